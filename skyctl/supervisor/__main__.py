"""`python -m skyctl.supervisor --fleet NAME`: started by `skyctl up`, not by hand."""

from __future__ import annotations

import argparse
import asyncio
import sys

from skyctl import startup


def main() -> int:
    startup.hurry()
    from skyctl.errors import SkyctlError
    from skyctl.store.paths import fleet_paths
    from skyctl.supervisor.daemon import serve

    parser = argparse.ArgumentParser(prog="python -m skyctl.supervisor")
    parser.add_argument("--fleet", required=True)
    options = parser.parse_args()
    try:
        asyncio.run(serve(fleet_paths(options.fleet)))
    except SkyctlError as error:
        sys.stderr.write(f"{error.kind}: {error.message}\n")
        return int(error.exit_code)
    finally:
        startup.leave()  # `down` waits for this
    return 0


if __name__ == "__main__":
    sys.exit(main())
