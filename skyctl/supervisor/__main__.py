"""`python -m skyctl.supervisor --fleet NAME`: started by `skyctl up`, not by hand."""

from __future__ import annotations

import argparse
import asyncio
import sys

from skyctl.errors import SkyctlError
from skyctl.startup import leave
from skyctl.store.paths import fleet_paths
from skyctl.supervisor.daemon import serve


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m skyctl.supervisor")
    parser.add_argument("--fleet", required=True)
    options = parser.parse_args()
    try:
        asyncio.run(serve(fleet_paths(options.fleet)))
    except SkyctlError as error:
        sys.stderr.write(f"{error.kind}: {error.message}\n")
        return int(error.exit_code)
    finally:
        leave()  # `down` waits for this
    return 0


if __name__ == "__main__":
    sys.exit(main())
