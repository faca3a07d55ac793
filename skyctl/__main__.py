"""The `skyctl` command, also as `python -m skyctl`."""

from __future__ import annotations

import os
import sys

from skyctl import startup
from skyctl.cli import front_page


def main() -> None:
    """Print the page of `skyctl --help` at once; everything else goes to the commands."""
    startup.have_streams()
    arguments = sys.argv[1:]
    # a shell that asks for completions calls us without arguments
    completing = "_SKYCTL_COMPLETE" in os.environ
    if not completing and (not arguments or front_page.asked_for(arguments)):
        sys.stdout.write(front_page.page())
        sys.exit(0 if arguments else 2)
    startup.hurry()
    from skyctl.cli.app import main as run

    try:
        run()
    except SystemExit as ended:
        startup.end(ended.code)
        raise
    finally:
        startup.leave()


if __name__ == "__main__":
    main()
