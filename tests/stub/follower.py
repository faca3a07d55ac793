"""Stands in for a part of a vLLM server that answers nobody. Like that one it notices the death of
no other part."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Say what it was started with, and run until somebody ends it."""
    print("headless:", *sys.argv[1:], flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
