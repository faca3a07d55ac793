"""The fleet files skyctl writes and ships are valid and say everything."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from skyctl.cli import init as scaffold_module
from skyctl.cli.init import ScaffoldRequest, fleet_file_text, name_for, scaffold
from skyctl.errors import ConflictError, FleetFileError, SkyctlError, UsageError
from skyctl.fleetfile.load import load_fleet, parse_fleet
from skyctl.fleetfile.schema import FleetConfig, json_schema
from skyctl.fleetfile.sections import (
    HealthPolicy,
    ReplicaGroup,
    RestartPolicy,
    RouterSection,
    WeightTransferSection,
)
from skyctl.fleetfile.values import resolve_relative

EXAMPLE = Path(__file__).parents[3] / "fleet.yaml.example"


def example_document() -> Any:
    return yaml.safe_load(EXAMPLE.read_text())


def test_the_example_loads_as_it_stands() -> None:
    loaded = load_fleet(EXAMPLE, environ={})
    assert loaded.config.model == "./checkpoints/a"


@pytest.mark.parametrize(
    "model",
    [FleetConfig, ReplicaGroup, RouterSection, WeightTransferSection, HealthPolicy, RestartPolicy],
)
def test_the_example_mentions_every_key(model: type[BaseModel]) -> None:
    text = EXAMPLE.read_text()
    missing = [key for key in model.model_fields if not re.search(rf"^[ #-]*{key}:", text, re.M)]
    assert missing == []


def test_values_the_example_calls_defaults_are_the_defaults() -> None:
    loaded = load_fleet(EXAMPLE, environ={}).config
    assert loaded.weight_transfer == WeightTransferSection()
    assert loaded.health == HealthPolicy()
    assert loaded.restart == RestartPolicy()
    plain = FleetConfig(name="x", model="y")
    for key in ("host", "share_gpus", "control_timeout_s", "drain_timeout_s", "stop_timeout_s"):
        assert getattr(loaded, key) == getattr(plain, key), key


def test_the_example_satisfies_the_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())
    jsonschema.validate(example_document(), json_schema())


@pytest.mark.parametrize(
    "change",
    [
        {"replcias": 2},
        {"replicas": 0},
        {"device": "tpu"},
        {"ports": [0]},
        {"control_timeout_s": 0},
        {"router": {"polcy": "random"}},
        {"api_key_env": "not a name"},
    ],
)
def test_the_json_schema_refuses_what_the_loader_refuses(change: dict[str, Any]) -> None:
    document = {**example_document(), **change}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, json_schema())
    with pytest.raises(FleetFileError):
        parse_fleet(json.dumps(document), Path("x"), {"MODEL": "m"})


@pytest.mark.parametrize(
    "request_",
    [
        ScaffoldRequest(Path(), tiny=True),
        ScaffoldRequest(Path(), model="Qwen/Qwen3-0.6B", replicas=4),
        ScaffoldRequest(Path(), model="/models/with space: and #${X}"),
        ScaffoldRequest(Path(), servers=("http://127.0.0.1:8000", "http://[::1]:8001")),
    ],
)
def test_written_files_load_and_satisfy_the_json_schema(request_: ScaffoldRequest) -> None:
    text = fleet_file_text(request_, "demo")
    config = parse_fleet(text, Path("fleet.yaml"), {}).config
    jsonschema.validate(yaml.safe_load(text), json_schema())
    assert config.name == "demo"
    if request_.servers:
        assert config.servers == list(request_.servers)
    else:
        assert config.replicas == request_.replicas
    if request_.model:
        assert config.model == request_.model


@pytest.mark.parametrize("name", ["123", "1e3", "no", "null", "0x10", "2026-01-01", "2026-99-99"])
def test_names_that_yaml_would_read_as_something_else_are_quoted(name: str) -> None:
    text = fleet_file_text(ScaffoldRequest(Path(), model="m"), name)
    assert parse_fleet(text, Path("x"), {}).config.name == name


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("/x/My Fleet_2", "my-fleet-2"),
        ("/", "fleet"),
        ("/x/" + "a" * 60, "a" * 40),
        ("/x/…", "fleet"),
    ],
)
def test_a_directory_gives_a_valid_name(directory: str, name: str) -> None:
    assert name_for(Path(directory)) == name


def test_a_directory_is_named_from_where_the_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models/a").mkdir(parents=True)
    for directory in (Path("deep/demo"), Path()):
        scaffold(ScaffoldRequest(directory, name="demo", model="models/a"))
        loaded = load_fleet(directory / "fleet.yaml")
        model = resolve_relative(loaded.config.model, directory.resolve())
        assert model == str(tmp_path / "models/a")


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("mine")
    with pytest.raises(ConflictError, match="exists already"):
        scaffold(ScaffoldRequest(tmp_path, model="m"))
    assert (tmp_path / "fleet.yaml").read_text() == "mine"
    scaffold(ScaffoldRequest(tmp_path, model="m", force=True))
    assert load_fleet(tmp_path / "fleet.yaml").config.model == "m"


def test_nothing_is_written_for_a_wrong_request(tmp_path: Path) -> None:
    target = tmp_path / "new"
    with pytest.raises(UsageError):
        scaffold(ScaffoldRequest(target, servers=("localhost:1",)))
    with pytest.raises(UsageError):
        scaffold(ScaffoldRequest(target, name="Bad_Name"))
    with pytest.raises(UsageError, match="excludes"):
        scaffold(ScaffoldRequest(target, tiny=True, model="m"))
    assert not target.exists()


def test_without_the_libraries_of_tiny_checkpoints_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SkyctlError, match="the base install leaves out"):
        scaffold(ScaffoldRequest(tmp_path / "demo", tiny=True))
    assert not list(tmp_path.iterdir())


def test_checkpoints_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(directory: Path, *, seed: int) -> Path:
        directory.mkdir(parents=True)
        (directory / "config.json").touch()
        if seed == 2:
            raise OSError("disk full")
        return directory

    monkeypatch.setattr(scaffold_module, "make_tiny_checkpoint", half)
    with pytest.raises(Exception, match="disk full"):
        scaffold(ScaffoldRequest(tmp_path, tiny=True))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["a"]
    assert not (tmp_path / "fleet.yaml").exists()


def test_checkpoints_that_are_there_are_kept(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "config.json").touch()
    result = scaffold(ScaffoldRequest(tmp_path, tiny=True))
    assert result.made == ()
    assert [path.name for path in result.kept] == ["a", "b"]


def test_a_file_that_cannot_be_written_again_stays_and_a_link_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "real.yaml"
    real.write_text("name: old\n")
    (tmp_path / "fleet.yaml").symlink_to(real)
    request = ScaffoldRequest(tmp_path, servers=("http://127.0.0.1:8000",), force=True)

    def full(path: Path, text: str, **_: Any) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(SkyctlError, match="No space left"):
            scaffold(request)
    assert real.read_text() == "name: old\n"
    scaffold(request)
    assert (tmp_path / "fleet.yaml").is_symlink()
    assert load_fleet(real, environ={}).config.servers
    assert {path.name for path in tmp_path.iterdir()} == {"fleet.yaml", "real.yaml"}
