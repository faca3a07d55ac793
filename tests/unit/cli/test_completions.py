"""The shipped completion scripts and the values skyctl completes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from skyctl.cli import complete

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


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Context:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SKYCTL_FILE", raising=False)
    monkeypatch.delenv("SKYCTL_FLEET", raising=False)
    monkeypatch.chdir(tmp_path)

    class Typed:
        params = {"file": tmp_path / "fleet.yaml", "fleet": None}  # noqa: RUF012

    return Typed()  # type: ignore[return-value]


def test_replicas_come_from_the_file(context: typer.Context, tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("name: demo\nmodel: x\nreplicas: 3\n")
    assert complete.replicas(context, "") == ["demo-0", "demo-1", "demo-2"]
    assert complete.replicas(context, "demo-2") == ["demo-2"]
    assert complete.processes(context, "r") == ["router"]
    (tmp_path / "fleet.yaml").write_text("name: far\nservers: ['http://h:1', 'http://h:2']\n")
    assert complete.replicas(context, "") == ["far-0", "far-1"]


def test_jobs_come_from_the_state(context: typer.Context, tmp_path: Path) -> None:
    from skyctl.store.paths import fleet_paths
    from skyctl.store.state import FleetState

    (tmp_path / "fleet.yaml").write_text("name: demo\nmodel: x\n")
    assert complete.jobs(context, "") == []
    paths = fleet_paths("demo")
    assert not paths.database.exists()  # completing makes no state
    paths.prepare()
    with FleetState(paths.database) as state:
        ids = [state.journal.begin("push", {}).id for _ in range(2)]
    assert complete.jobs(context, "") == sorted(ids)
    assert complete.versions(context, "") == []


@pytest.mark.parametrize("text", ["", "name: [", "name: 7\n"])
def test_a_broken_file_completes_to_nothing(
    context: typer.Context, tmp_path: Path, text: str
) -> None:
    (tmp_path / "fleet.yaml").write_text(text)
    assert complete.replicas(context, "") == complete.jobs(context, "") == []


def test_checkpoints_are_told_from_other_directories(
    context: typer.Context, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints/a").mkdir(parents=True)
    (tmp_path / "checkpoints/a/config.json").touch()
    (tmp_path / "checkpoints/deep").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "file").touch()
    assert complete.checkpoints("") == ["checkpoints/"]
    assert complete.checkpoints("checkpoints/") == ["checkpoints/a", "checkpoints/deep/"]
    assert complete.checkpoints("nowhere/x") == []
