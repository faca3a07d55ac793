"""Completion scripts as shells run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GENERATOR = ROOT / "scripts/generate-completions"
SCRIPTS = {"bash": "skyctl.bash", "zsh": "_skyctl", "fish": "skyctl.fish"}


def test_the_completion_scripts_are_up_to_date() -> None:
    result = subprocess.run(
        [sys.executable, GENERATOR, "--check"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("shell", SCRIPTS)
def test_each_shell_can_parse_its_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = ROOT / "completions" / SCRIPTS[shell]
    result = subprocess.run([shell, "-n", script], capture_output=True, text=True, timeout=30)
    assert (result.returncode, result.stderr) == (0, "")


def bash(tmp_path: Path, *words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    line = " ".join(f"'{word}'" for word in words)
    script = (
        f"source {ROOT}/completions/skyctl.bash; COMP_WORDS=({line}); "
        f'COMP_CWORD={len(words) - 1}; _skyctl; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    env = {
        **os.environ,
        "SKYCTL_HOME": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    result = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return result.stdout.split()


def test_bash_completes_commands_options_choices_and_files(tmp_path: Path) -> None:
    (tmp_path / "some.yaml").touch()
    assert bash(tmp_path, "skyctl", "val") == ["validate"]
    assert bash(tmp_path, "skyctl", "validate", "--off") == ["--offline"]
    assert bash(tmp_path, "skyctl", "--quiet", "plan", "so") == ["some.yaml"]
    assert bash(tmp_path, "skyctl", "plan", "-f", "so") == ["some.yaml"]
    assert bash(tmp_path, "skyctl", "init", "--name", "") == []


def test_bash_asks_skyctl_for_the_names_of_fleets(tmp_path: Path) -> None:
    for name in ("one", "other", "two"):
        (tmp_path / "fleets" / name).mkdir(parents=True)
        (tmp_path / "fleets" / name / "fleet.yaml").touch()
    assert bash(tmp_path, "skyctl", "plan", "--fleet", "o") == ["one", "other"]
