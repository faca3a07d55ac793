"""`python -m skyctl.supervisor --fleet NAME`: started by `skyctl up`, not by hand."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import NoReturn

from skyctl import startup

_TASKS_END_S = 5.0


def main() -> int:
    startup.become_command()
    startup.speed_up_imports()
    from skyctl.errors import SkyctlError
    from skyctl.store.paths import fleet_paths
    from skyctl.supervisor.daemon import serve

    async def serve_and_end() -> NoReturn:
        await serve(fleet_paths(options.fleet))
        # as `asyncio.run` would, but for threads: one may hang in a read, of a file system that is
        # gone
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_TASKS_END_S)
        os._exit(0)

    parser = argparse.ArgumentParser(prog="python -m skyctl.supervisor")
    parser.add_argument("--fleet", required=True)
    options = parser.parse_args()
    try:
        asyncio.run(serve_and_end())
    except SkyctlError as error:
        sys.stderr.write(f"{error.kind}: {error.message}\n")
        return int(error.exit_code)


if __name__ == "__main__":
    sys.exit(main())
