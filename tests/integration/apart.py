"""Ranks that count as on machines of their own: `python -m tests.integration.apart FILE …`."""

from __future__ import annotations

import os
import runpy
import sys

from skyctl.api import trainer_opening

if __name__ == "__main__":
    trainer_opening.machine = lambda: f"machine {os.environ['RANK']}"
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
