"""The values skyctl completes."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from skyctl.cli import complete


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Context:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SKYCTL_FILE", raising=False)
    monkeypatch.delenv("SKYCTL_FLEET", raising=False)
    monkeypatch.chdir(tmp_path)

    class Typed:
        params = {"file": [tmp_path / "fleet.yaml"], "fleet": None}  # noqa: RUF012

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
