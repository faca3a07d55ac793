"""What a user gets wrong, and the one line and exit code that answer it. No real server runs."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.stub_fleet import StubFleet
from tests.unit.push.checkpoints import CONFIG, tiny_tensors, write_checkpoint

NO_GPU = "#!/bin/sh\nexit 9\n"
TWO_GPUS = "#!/bin/sh\necho '0, GPU-a, Made Up, 81920'\necho '1, GPU-b, Made Up, 81920'\n"


@pytest.fixture
def fleet(tmp_path: Path) -> StubFleet:
    """A directory without a fleet file."""
    return StubFleet(tmp_path)


def refused(fleet: StubFleet, *arguments: str, code: int) -> tuple[str, str]:
    """Message and hint of a refusal, which is one `error:` line and at most one `hint:` line."""
    lines = fleet.run(*arguments, expect=code).stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    hints = [line for line in lines if line.startswith("hint: ")]
    assert len(errors) == 1 and len(hints) <= 1, lines
    assert not any("Traceback" in line for line in lines)
    hint = hints[0].removeprefix("hint: ") if hints else ""
    return errors[0].removeprefix("error: "), hint


def test_no_fleet_file(fleet: StubFleet) -> None:
    for command in ("up", "status", "pause"):
        message, hint = refused(fleet, command, code=4)
        assert message == "there is no fleet.yaml here and no fleet"
        assert "skyctl init" in hint
    assert refused(fleet, "up", "-f", "nope.yaml", code=2)[0] == "nope.yaml: no such file"
    assert (
        refused(fleet, "status", "--fleet", "nope", code=4)[0] == "there is no fleet named 'nope'"
    )


@pytest.mark.parametrize(
    ("option", "value"), [("--share", "lots"), ("--promote-after", "10x"), ("--rollback-if", "x>1")]
)
def test_a_canary_of_what_cannot_be_read(fleet: StubFleet, option: str, value: str) -> None:
    options = {"--share": "10%", option: value}
    given = [word for pair in options.items() for word in pair]
    message, hint = refused(fleet, "canary", "start", "two", *given, code=2)
    assert value in message and hint.startswith("write it like")
    assert (option in hint) is (option != "--rollback-if")


def test_a_directory_in_place_of_a_fleet_file(fleet: StubFleet) -> None:
    fleet.write()
    message, hint = refused(fleet, "validate", "-f", ".", code=2)
    assert message.endswith("is a directory, not a fleet file")
    assert hint == "give the file: -f fleet.yaml"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("replica: 2", "fleet.yaml:3: unknown key 'replica'; did you mean 'replicas'?"),
        (
            "replicas: two",
            "fleet.yaml:3: replicas: expected a whole number or a list of groups, got 'two'",
        ),
        (
            "health: {interval_s: soon}",
            "fleet.yaml:3: health.interval_s: expected a number, got 'soon'",
        ),
        ("  env: {}", "fleet.yaml:3: not valid YAML: mapping values are not allowed here"),
        ("served_model_name: ${NOT_SET_AT_ALL}", None),
    ],
)
def test_a_wrong_line_is_named_before_anything_starts(
    fleet: StubFleet, lines: str, message: str | None
) -> None:
    (fleet.directory / "fleet.yaml").write_text(f"name: bad\nmodel: ./model\n{lines}\n")
    found = refused(fleet, "up", code=2)[0]
    assert found == (message or "fleet.yaml:3: the environment variable NOT_SET_AT_ALL is not set")


def test_a_model_that_is_not_there(fleet: StubFleet) -> None:
    fleet.write(extra="served_model_name: m")
    (fleet.directory / "model").rename(fleet.directory / "elsewhere")
    message, hint = refused(fleet, "up", code=2)
    assert message == f"model './model': {fleet.directory / 'model'} does not exist"
    assert "relative to the fleet file" in hint
    fleet.run("validate", expect=1)


def test_a_port_that_somebody_holds(fleet: StubFleet) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        fleet.write(replicas=1, extra=f"ports: [{port}]")
        message, hint = refused(fleet, "up", code=2)
    assert message.startswith(f"stubs-0: port {port} is taken by pid {os.getpid()} (")
    assert "leave it out for a free port" in hint


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (NO_GPU, "device is cuda, and this machine has no NVIDIA GPU (nvidia-smi lists none)"),
        (TWO_GPUS, "GPU 7 does not exist; there are: 0, 1"),
    ],
)
def test_a_gpu_that_does_not_exist(
    fleet: StubFleet, monkeypatch: pytest.MonkeyPatch, driver: str, message: str
) -> None:
    fleet.write(replicas=1, extra="gpus: [7]")
    file = fleet.directory / "fleet.yaml"
    file.write_text(file.read_text().replace("device: cpu", "device: cuda"))
    command = fleet.directory / "bin" / "nvidia-smi"
    command.parent.mkdir()
    command.write_text(driver)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert refused(fleet, "up", code=2)[0] == message


@pytest.mark.parametrize(
    ("typed", "message", "hint"),
    [
        ("statsu", "no such command 'statsu'", "did you mean status"),
        ("status demo", "got unexpected extra argument(s) (demo)", "--fleet demo"),
        ("down x.yaml", "got unexpected extra argument(s) (x.yaml)", "-f x.yaml"),
        (
            "up x.yaml -f y.yaml",
            "the fleet file is given twice: x.yaml and y.yaml",
            "-f FILE -f FILE",
        ),
        ("logs -f router", "there is no fleet file router", "skyctl logs --follow router"),
        ("logs -f", "option '-f' requires an argument", "skyctl logs --follow"),
        ("wait ready", "'ready' is a condition, not a server", "skyctl wait --for ready"),
        ("pause --server a", "no such option: --server", "skyctl pause SERVER"),
        ("-f fleet.yaml status", "no such option: -f", "behind the command"),
        ("pause --mode kepe", "'kepe' is not one of 'abort', 'wait', 'keep'", "pause --help"),
        ("sync-weights", "missing argument 'CKPT'", "sync-weights --help"),
        ("sync-weights x --chunk-size 1XB", "'1XB' is not a size", "sync-weights --help"),
        ("scale two", "invalid value for 'N'", "scale --help"),
        ("pause --timeout -1", "invalid value for '--timeout'", "pause --help"),
        ("recover --timeout nan", "invalid value for '--timeout'", "recover --help"),
        ("sync-weights x --timeout -1", "invalid value for '--timeout'", "sync-weights --help"),
        ("jobs wait push-1 --timeout -1", "invalid value for '--timeout'", "jobs wait --help"),
        ("up --timeout -1", "invalid value for '--timeout'", "up --help"),
        ("wake --tags wieghts", "'wieghts' cannot be woken", "weights, kv_cache"),
        ("generate", "give one prompt or --input FILE", "skyctl generate"),
        ("generate hi --session-id é", "a text of printable ASCII, not 'é'", "generate --help"),
        ("init --force --servers ,", "--servers names no URL", "--servers http://"),
    ],
)
def test_a_wrong_command_line(fleet: StubFleet, typed: str, message: str, hint: str) -> None:
    told = refused(fleet, *typed.split(), code=2)
    assert message in told[0] and hint in told[1]


def test_a_fleet_that_is_down(fleet: StubFleet) -> None:
    fleet.write(replicas=1)
    for command in ("pause", "sync-weights model", "generate hello", "restart", "urls", "scale 2"):
        message, hint = refused(fleet, *command.split(), code=4)
        assert message == "fleet stubs is not running"
        assert hint == "start it: skyctl up"
    fleet.run("status")
    fleet.run("status", "--exit-code", expect=4)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubFleet]:
    """One replica that serves `model`, a checkpoint of the tiny architecture."""
    fleet = StubFleet(tmp_path_factory.mktemp("running"))
    fleet.write(replicas=1)
    write_checkpoint(fleet.directory / "model", tiny_tensors(1))
    write_checkpoint(fleet.directory / "next", tiny_tensors(2))
    fleet.run("up")
    yield fleet
    fleet.run("down", "--drain-timeout", "0")


def test_names_that_nothing_has(running: StubFleet) -> None:
    for command in ("restart stubs-7", "pause stubs-7"):
        message, hint = refused(running, *command.split(), code=4)
        assert message == "fleet stubs has no server 'stubs-7'"
        assert hint == "its servers are: stubs-0"
    assert refused(running, "logs", "stubs-7", code=4)[0] == "there is no log of 'stubs-7'"
    assert refused(running, "jobs", "show", "push-99", code=4)[0] == "there is no job 'push-99'"


def test_a_checkpoint_path_that_is_wrong(running: StubFleet) -> None:
    here = running.directory
    assert refused(running, "sync-weights", "nope", code=4) == (
        "checkpoint nope does not exist",
        f"give a local directory; this name means {here / 'nope'}",
    )
    message, hint = refused(running, "sync-weights", "next/config.json", code=1)
    assert message == f"checkpoint {here / 'next' / 'config.json'} is a file"
    assert hint == f"give the directory that holds it: {here / 'next'}"
    (here / "runs").mkdir()
    message, _ = refused(running, "sync-weights", "runs", code=1)
    assert message == f"{here / 'runs'} is not a checkpoint: it has no config.json"


def test_a_checkpoint_that_cannot_be_what_was_meant_pauses_nothing(running: StubFleet) -> None:
    here = running.directory
    short = write_checkpoint(here / "short", tiny_tensors(2))
    shard = next(short.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 10)
    message, _ = refused(running, "sync-weights", "short", code=1)
    assert message.startswith(f"{shard} is truncated: its header announces ")

    config = {**CONFIG, "architectures": ["OtherForCausalLM"]}
    other = write_checkpoint(here / "other", tiny_tensors(2), config=config)
    message, hint = refused(running, "sync-weights", "other", code=1)
    assert message == (
        f"{other} does not fit the running model: architectures is OtherForCausalLM here, "
        "the servers run TinyForCausalLM"
    )
    assert "same architecture" in hint
    assert running.replicas()["stubs-0"]["state"] == "ready"
    assert running.replicas()["stubs-0"]["weight_version"] is None


def test_a_transport_the_servers_were_not_started_for(running: StubFleet) -> None:
    message, hint = refused(running, "sync-weights", "next", "--transport", "nccl", code=1)
    assert "transport nccl needs servers started with the weight-transfer backend" in message
    assert "--transport disk" in hint
