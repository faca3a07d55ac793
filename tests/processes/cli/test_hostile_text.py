"""A reader of a command's output that leaves."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("stream", ["out", "raw"])
def test_a_reader_that_has_seen_enough_is_no_failure(stream: str) -> None:
    """As `skyctl logs -f | head -1`."""
    script = (
        "import sys; from skyctl.cli import app\n"
        "def endless(**_):\n"
        "    from skyctl import output\n"
        f"    while True: output.{'out.print' if stream == 'out' else 'raw'}('line\\n')\n"
        "app.verbs_to_register = lambda arguments: []\n"
        "app.app.command('endless')(lambda: endless())\n"
        "app.app.command('other')(lambda: None)\n"
        "sys.argv = ['skyctl', 'endless']; app.main()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.wait(timeout=30) in (0, 141)
        assert process.stderr.read() == ""


_FAILURES = [
    ([], "output.emit({}, 'line', exit_code=ExitCode.NOT_FOUND)"),
    (["--json"], "output.emit({}, exit_code=ExitCode.NOT_FOUND)"),
    (["--json"], "raise NotFoundError('line')"),
]


@pytest.mark.parametrize(("flag", "failure"), _FAILURES)
def test_a_reader_that_left_makes_no_success_of_a_failure(flag: list[str], failure: str) -> None:
    """As `skyctl status --exit-code | head -1`."""
    script = (
        "import sys; from skyctl.cli import app\n"
        "def bad(json: bool = False):\n"
        "    from skyctl import output\n"
        "    from skyctl.errors import ExitCode, NotFoundError\n"
        "    sys.stdin.read()\n"
        f"    {failure}\n"
        "app.verbs_to_register = lambda arguments: []\n"
        "app.app.command('bad')(bad)\n"
        "app.app.command('other')(lambda: None)\n"
        f"sys.argv = ['skyctl', 'bad', *{flag}]; app.main()\n"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr
        process.stdout.close()
        process.stdin.close()
        assert process.wait(timeout=30) == 4
        assert process.stderr.read() == ""
