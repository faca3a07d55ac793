"""The reference as its script writes it, and man pages as groff reads them."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from skyctl.cli import app as app_module
from tests.unit.cli.test_reference import ROOT


def test_reference_man_pages_and_front_page_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "generate-reference"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_man_pages_render_without_warnings() -> None:
    pages = sorted((ROOT / "man").glob("*.1"))
    assert len(pages) > len(app_module.VERBS)
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", "-z", *map(str, pages)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
