"""`skyctl tinker` over the storage of a real API process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skyctl.core.registry import remember, select
from skyctl.store.paths import fleet_paths
from tests.processes.tinker.serving import BASE, KEY, ServingProcess
from tests.tinker_sdk import service_client
from tests.unit.cli.commands import run

pytest.importorskip("tinker")
from tests.processes.tinker.steps import step

Command = Callable[..., tuple[int, Any]]


@pytest.fixture
def trainer(serving: ServingProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with service_client(base_url=serving.url, api_key=KEY) as client:
        trainer = client.create_lora_training_client(base_model=BASE, rank=8, seed=3).result()
        for _ in range(3):
            step(trainer)
        yield trainer


@pytest.fixture
def skyctl(
    serving: ServingProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Command:
    """Commands beside a fleet whose Tinker API is the serving one."""
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text(
        f"name: lab\nmodel: {serving.checkpoint}\nserved_model_name: tiny\n"
        "lora: {max_rank: 32}\n"
        f"tinker: {{base_model: {BASE}, port: {serving.port}, storage: {serving.directory}}}\n"
    )
    remember(select(None, None))
    key = fleet_paths("lab").tinker_key
    key.touch(0o600)
    key.write_text(KEY)
    capsys.readouterr()

    def command(*arguments: str) -> tuple[int, Any]:
        code, out, _ = run(monkeypatch, capsys, *arguments, "--json")
        return code, json.loads(out)

    return command


def test_a_checkpoint_is_listed_found_copied_and_deleted(
    skyctl: Command, trainer: Any, tmp_path: Path
) -> None:
    kept, gone = (trainer.save_state(name).result().path for name in ("kept", "gone"))
    code, answer = skyctl("tinker")
    listed = {entry["path"]: entry for entry in answer["data"]["checkpoints"]}
    assert code == 0 and {kept, gone} <= set(listed)
    assert (listed[kept]["kind"], listed[kept]["rank"]) == ("training", 8)

    directory = Path(skyctl("tinker", "path", kept)[1]["data"]["directory"])
    assert (directory / "adapter_model.safetensors").stat().st_size < listed[kept]["size"]
    assert skyctl("tinker", "export", kept, "copy")[0] == 0
    copied = {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()}
    assert set(copied) == {"adapter_model.safetensors", "adapter_config.json"}
    assert all((directory / name).read_bytes() == content for name, content in copied.items())
    assert skyctl("tinker", "export", kept, "copy")[0] == 2  # it is there

    assert skyctl("tinker", "rm", gone, "tinker://not/weights/there")[0] == 4
    assert skyctl("tinker", "path", gone)[0] == 0  # nothing was deleted
    assert skyctl("tinker", "rm", gone)[1]["data"]["deleted"] == [gone]
    assert skyctl("tinker", "path", gone)[0] == 4
    data = skyctl("tinker", "rm", trainer.model_id)[1]["data"]
    assert data == {"deleted": [kept]}
    assert not directory.exists()


def test_an_adapter_is_merged_into_the_fleets_model(
    skyctl: Command, trainer: Any, tmp_path: Path, serving: ServingProcess
) -> None:
    path = trainer.save_state("merged").result().path
    assert skyctl("tinker", "export", path, "model", "--merged")[1]["data"]["merged"]
    files = {path.name for path in serving.checkpoint.iterdir()}
    assert {path.name for path in (tmp_path / "model").iterdir()} == files
    content = [
        (place / "model.safetensors").read_bytes()
        for place in (serving.checkpoint, tmp_path / "model")
    ]
    assert len(content[0]) == len(content[1]) and content[0] != content[1]


def test_a_damaged_checkpoint_is_not_copied(skyctl: Command, trainer: Any, tmp_path: Path) -> None:
    path = trainer.save_weights_for_sampler("damaged").result().path
    file = Path(skyctl("tinker", "path", path)[1]["data"]["directory"], "adapter_model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, answer = skyctl("tinker", "export", path, "copy")
    assert code == 1 and "is not what was written" in answer["error"]["message"]
    assert list(tmp_path.glob("*copy*")) == []
