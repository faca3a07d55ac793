"""The `skyctl` command, also as `python -m skyctl`.

The page that `skyctl --help` prints is generated ahead, so that it costs no imports: from the table
of commands, by scripts/generate-reference.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from skyctl import startup

FRONT_PAGE = Path(__file__).with_name("cli") / "front_page.txt"


def main() -> None:
    """Print the page of `skyctl --help` at once; everything else goes to the commands."""
    startup.ensure_std_streams()
    arguments = sys.argv[1:]
    # a shell that asks for completions calls us without arguments
    completing = "_SKYCTL_COMPLETE" in os.environ
    if not completing and (not arguments or _only_asks_for_help(arguments)):
        sys.stdout.write(_front_page())
        sys.exit(0 if arguments else 2)
    startup.become_command()
    startup.hold_interrupts(True)
    startup.speed_up_imports()
    from skyctl.cli.app import main as run
    from skyctl.cli.suspending import handle_suspend

    handle_suspend()
    try:
        run()
    except SystemExit as exit_:
        startup.exit_now(exit_.code)
        raise
    finally:
        startup.skip_final_collection()


def _only_asks_for_help(arguments: Sequence[str]) -> bool:
    return list(arguments) in (["--help"], ["-h"])


def _front_page() -> str:
    """The page; headings are bold if stdout is a terminal with colours."""
    text = FRONT_PAGE.read_text(encoding="utf-8")
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return text
    return re.sub(r"^(\S.*):$", "\033[1m\\1:\033[0m", text, flags=re.MULTILINE)


if __name__ == "__main__":
    main()
