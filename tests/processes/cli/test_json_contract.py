"""The JSON contract: what every command prints with --json, on a fleet of stubs, is docs/json.md.

One fleet serves all tests of this file, in any order.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer

from skyctl import startup
from skyctl.cli import app as app_module
from skyctl.store.paths import FleetPaths
from tests.faults.stub_fleet import StubFleet
from tests.processes.cli.json_contract import DOCUMENT, Node, differences, specification, tables
from tests.unit.adapters.files import lora, make_adapter
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.tinker.stored import store_checkpoint

TABLES = tables(DOCUMENT.read_text())
ENVELOPE = ["skyctl", "command", "ok", "exit_code", "data", "error"]
# one way to call each command, in an order in which each finds what it needs
CALLS = [
    "init new --model x",
    "validate",
    "plan",
    "up",
    "ls",
    "status --exit-code",
    "status",
    "wait",
    "top --interval 0.2",
    "logs -n 3",
    "events --since 10m",
    "urls",
    "generate hi --max-tokens 4",
    "pause --mode keep",
    "resume",
    "sleep",
    "wake",
    "switch stubs",
    "switch stubs --dry-run",
    "sync-weights b",
    "sync-weights b --dry-run",
    "jobs",
    "jobs show",
    "jobs show push-1",
    "jobs wait push-1",
    "jobs cancel push-1",
    "adapters load x x1",
    "adapters sync x x2",
    "adapters",
    "adapters list",
    "adapters unload x",
    "tinker",
    "tinker ls --all",
    "tinker path tinker://run/weights/final",
    "tinker export tinker://run/weights/final exported",
    "weights",
    "weights history",
    "weights verify",
    "weights rendezvous",
    "sync-weights b --keep --weight-version k1",
    "weights kept",
    "sync-weights model --weight-version k2",
    "weights save saved",
    "weights forget k1",
    "canary start b --share 50%",
    "canary",
    "canary status",
    "canary rollback",
    "canary start b --share 50%",
    "canary promote",
    "drain",
    "drain --off",
    "doctor",
    "help",
    "help states",
    "help pause",
    "recover",
    "recover --dry-run",
    "restart stubs-0",
    "scale 1",
    "rollout",
    "rollout undo",
    "smoke --reuse",
    "down",
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubFleet]:
    directory = tmp_path_factory.mktemp("contract")
    fleet = StubFleet(directory)
    fleet.write(
        replicas=2,
        extra="args: {token-delay-s: 0.005}\nlora: {}\nrouter: {policy: round_robin}\n"
        "sleep_group: all\nweight_transfer: {transport: disk, backend: nccl}",
    )
    up_proj = lora("base_model.model.model.layers.0.mlp.up_proj")
    for number in (1, 2):
        make_adapter(directory / f"x{number}", up_proj, value=number / 10)
    write_checkpoint(directory / "model")
    write_checkpoint(directory / "b", tiny_tensors(9))
    store_checkpoint(FleetPaths(directory / "home", "stubs").tinker)
    yield fleet
    fleet.run("down", "--drain-timeout", "0")


@pytest.fixture(scope="module")
def stopped(fleet: StubFleet) -> None:
    """It was up once, also where none of the calls before ran in this process."""
    fleet.run("up")
    fleet.run("down")


@pytest.fixture
def here(fleet: StubFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as a shell in the fleet's directory."""
    for name in [name for name in os.environ if name.startswith("SKYCTL_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setenv("SKYCTL_HOME", str(fleet.directory / "home"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    monkeypatch.chdir(fleet.directory)


def skyctl(*arguments: str) -> tuple[int, str, str]:
    """The command in this process: its exit code, stdout and stderr."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["skyctl", *arguments]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            app_module.main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
        startup.hold_interrupts(False)  # this process goes on
    assert isinstance(code, int)
    return code, out.getvalue(), err.getvalue()


def envelope(*arguments: str) -> tuple[dict[str, Any], str]:
    """The one document on stdout, checked against the exit code, and stderr."""
    code, out, err = skyctl(*arguments, "--json")
    found: dict[str, Any] = json.loads(out)
    assert list(found) == ENVELOPE
    assert found["skyctl"] == 1
    assert found["exit_code"] == code
    assert found["ok"] is (code == 0)
    return found, err


def test_data_has_the_documented_keys(here: None, subtests: pytest.Subtests) -> None:
    for call in CALLS:
        with subtests.test(call):
            found, err = envelope(*call.split())
            assert (found["error"], err) == (None, "")
            assert found["command"] in call
            expected = specification(found["command"], TABLES)
            assert differences(found["data"], expected) == []


def command_names() -> list[str]:
    app_module.register(app_module.VERBS)
    names = []
    for verb in app_module.VERBS:
        target = getattr(sys.modules[f"skyctl.cli.{verb.module}"], verb.function)
        names.append(verb.name)
        if isinstance(target, typer.Typer):
            names += [
                f"{verb.name} {below.name or below.callback.__name__}"  # type: ignore[union-attr]
                for below in target.registered_commands
            ]
    return names


def test_every_command_is_documented_and_called_here() -> None:
    objects = {"Status", "Adapter", "Outcomes", "Job", "PushResult", "Push"}
    other = {"schema"}  # a schema
    elsewhere = {"tinker rm"}  # it needs a trainer: processes/tinker/test_stored.py
    documented = set(TABLES) - objects | other
    assert documented == set(command_names())
    called = {
        name for name in command_names() for call in CALLS if f"{call} ".startswith(f"{name} ")
    }
    assert set(command_names()) - called == other | elsewhere


@pytest.mark.parametrize(
    ("call", "kind", "code"),
    [
        ("status --frobnicate", "UsageError", 2),
        ("frobnicate", "UsageError", 2),
        ("pause --mode never", "UsageError", 2),
        ("jobs wait", "UsageError", 2),
        ("sync-weights", "UsageError", 2),
        ("sync-weights --rollback never-pushed", "NotFoundError", 4),
        ("status -f missing.yaml", "FleetFileError", 2),
        ("status --fleet nope", "NotFoundError", 4),
        ("jobs show push-99", "NotFoundError", 4),
        ("pause", "FleetDownError", 4),
        ("restart", "FleetDownError", 4),
        ("sync-weights nowhere", "NotFoundError", 4),
        ("wait --timeout 0", "DeadlineExceeded", 124),
        ("wait --for nothing", "UsageError", 2),
        ("status --watch", "UsageError", 2),
        ("logs --follow", "UsageError", 2),
        ("up --attach", "UsageError", 2),
        ("help nothing", "NotFoundError", 4),
        ("generate", "UsageError", 2),
    ],
)
def test_failures_are_envelopes_too(
    here: None, stopped: None, call: str, kind: str, code: int
) -> None:
    found, err = envelope(*call.split())
    assert (found["error"]["kind"], found["exit_code"], err) == (kind, code, "")
    assert set(found["error"]) == {"kind", "message", "hint"}
    assert found["error"]["message"] and isinstance(found["data"], dict)


def test_ctrl_c_and_bugs_are_envelopes_too(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import skyctl.help

    def fails(error: BaseException) -> Any:
        def topics() -> dict[str, str]:
            raise error

        return topics

    monkeypatch.setattr(skyctl.help, "topics", fails(KeyboardInterrupt()))
    found, _ = envelope("help")
    assert (found["exit_code"], found["error"]["kind"]) == (130, "Interrupted")
    monkeypatch.setattr(skyctl.help, "topics", fails(ZeroDivisionError("x")))
    found, err = envelope("help")
    assert (found["exit_code"], found["error"]["kind"]) == (1, "InternalError")
    assert "Traceback" in err


def test_without_json_results_alone_are_on_stdout(here: None) -> None:
    _, out, err = skyctl("up", "--no-router")
    assert "healthy" in out and "starting" not in out
    assert "stubs-0: ready" in err and "\x1b[" not in out + err
    _, out, err = skyctl("scale", "2", "-q")
    assert "healthy" in out and err == ""
    _, _, err = skyctl("-q", "status")
    assert err == ""


def test_the_environment_chooses_the_fleet(
    here: None, fleet: StubFleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fleet.run("up")
    monkeypatch.chdir(tmp_path)
    for name, value in (
        ("SKYCTL_FLEET", "stubs"),
        ("SKYCTL_FILE", str(fleet.directory / "fleet.yaml")),
    ):
        monkeypatch.setenv(name, value)
        found, _ = envelope("status")
        assert found["data"]["name"] == "stubs"
        monkeypatch.delenv(name)


def test_every_command_about_a_fleet_takes_file_fleet_and_json() -> None:
    import inspect

    app_module.register(app_module.VERBS)
    for verb in app_module.VERBS:
        target = getattr(sys.modules[f"skyctl.cli.{verb.module}"], verb.function)
        functions = [target]
        if isinstance(target, typer.Typer):
            assert target.registered_callback is not None
            functions = [target.registered_callback.callback]
            functions += [below.callback for below in target.registered_commands]
        for function in functions:
            parameters = inspect.signature(function).parameters
            assert {"json", "as_json"} & set(parameters), verb.name
            if verb.name not in ("init", "ls", "schema", "help"):
                assert {"file", "fleet"} <= set(parameters), verb.name


def test_the_comparison_finds_what_is_missing_and_what_is_new() -> None:
    table = "a\nb[].c\nd.*.e\nf{}\ng?\n"
    expected: Node = specification("t", {"t": table})
    good = {"a": None, "b": [{"c": 1}], "d": {"x": {"e": 1}}, "f": {"any": 1}}
    assert differences(good, expected) == []
    assert differences({**good, "h": 1}, expected) == ["data.h is not documented"]
    assert differences({**good, "b": [{}]}, expected) == ["data.b[].c is missing"]
    assert differences({**good, "b": [{"c": 1, "x": 2}]}, expected) == [
        "data.b[].x is not documented"
    ]
    assert differences({**good, "d": {"x": {}}}, expected) == ["data.d.*.e is missing"]
    del good["a"]
    assert differences(good, expected) == ["data.a is missing"]
