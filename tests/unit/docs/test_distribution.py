"""The distribution is `skyctl-fleet`: on the package index `skyctl` is an unrelated project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_distribution_has_a_name_of_its_own_and_the_command_keeps_its() -> None:
    assert PROJECT["name"] == "skyctl-fleet"
    assert list(PROJECT["scripts"]) == ["skyctl"]


def test_nobody_is_told_to_install_the_other_project() -> None:
    told = re.compile(r"install[^\n`]* '?skyctl(?:\[|'|`|$)")
    warned = "from a package index installs an unrelated project"
    files = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "skyctl").rglob("*.py"), ROOT / "README.md"]
    lines = [line for file in files for line in file.read_text().splitlines()]
    assert [line for line in lines if told.search(line) and warned not in line] == []


def test_the_lock_leaves_the_project_itself_out() -> None:
    uninstalled = re.findall(r"uninstall .*", (ROOT / "scripts/lock.sh").read_text())
    assert len(uninstalled) == 2
    assert all(line.endswith(PROJECT["name"]) for line in uninstalled)
