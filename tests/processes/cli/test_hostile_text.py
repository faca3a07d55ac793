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
        "app.asked_for = lambda arguments: []\n"
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
