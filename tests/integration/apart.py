"""Ranks that count as on machines of their own: `python -m tests.integration.apart FILE …`."""

from __future__ import annotations

import os
import runpy
import sys

from skyctl.live.meeting import Place

if __name__ == "__main__":
    place = Place(f"machine {os.environ['RANK']}", "127.0.0.1")
    Place.own = lambda: place  # type: ignore[method-assign]
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
