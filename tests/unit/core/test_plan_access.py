"""What planned servers require of those who ask them, and what they trust."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from skyctl.core.plan import FleetPlan
from skyctl.errors import UsageError
from skyctl.store.credentials import AT_SPAWN
from tests.unit.core.plans import gpus, plan, value_of


def test_the_api_key_travels_in_the_environment_and_is_masked() -> None:
    environ = {"MY_KEY": "s3cret"}
    planned = plan(
        device="cpu", api_key_env="MY_KEY", environ=environ, env={"HF_TOKEN": "hf_1", "PLAIN": "p"}
    )
    (server,) = planned.servers
    assert server.env["VLLM_API_KEY"] == "s3cret"
    assert not any("s3cret" in argument for argument in server.argv)
    shown = planned.to_json()["servers"][0]["env"]
    assert (shown["VLLM_API_KEY"], shown["HF_TOKEN"], shown["PLAIN"]) == ("***", "***", "p")
    assert "s3cret" not in str(planned.to_json()) + repr(planned)


def test_a_key_that_is_not_set_is_refused() -> None:
    with pytest.raises(UsageError, match="MY_KEY") as caught:
        plan(device="cpu", api_key_env="MY_KEY")
    assert "export MY_KEY" in caught.value.hint


def guard_of(planned: FleetPlan) -> tuple[str | None, set[str]]:
    """The middleware, and the secrets a server gets at its spawn."""
    (server,) = planned.servers
    loaded = server.argv[-1] if "Guard" in server.argv[-1] else None
    return loaded, {name for name, value in server.env.items() if value == AT_SPAWN}


def test_auth_says_which_secrets_a_server_gets() -> None:
    token, key = "SKYCTL_CONTROL_TOKEN", "VLLM_API_KEY"
    own = "skyctl.engines.inside.guard.Guard"
    assert guard_of(plan(device="cpu")) == (own, {token, key})
    assert guard_of(plan(device="cpu", auth="control")) == (own, {token})
    assert guard_of(plan(device="cpu", auth="none")) == (None, set())
    named = plan(device="cpu", api_key_env="MY_KEY", environ={"MY_KEY": "s3cret"})
    assert guard_of(named) == (own, {token})
    assert named.servers[0].env[key] == "s3cret"
    assert named.to_json()["servers"][0]["env"][token] == "***"


def test_the_guard_is_added_after_the_files_own_middleware() -> None:
    (server,) = plan(device="cpu", args={"middleware": "mine.Own"}).servers
    middleware = [after for word, after in pairwise(server.argv) if word == "--middleware"]
    inside = "skyctl.engines.inside"
    assert middleware == [
        "mine.Own", f"{inside}.versions.Versioned", f"{inside}.gate.Gate", f"{inside}.guard.Guard"
    ]  # fmt: skip


def test_a_server_of_several_processes_has_no_gate() -> None:
    """A pause, or a label, would reach one of them."""
    (server,) = plan(device="cpu", args={"api-server-count": 2}).servers
    assert server.argv.count("--middleware") == 1


def test_another_interpreter_needs_no_skyctl_and_keeps_its_own_path() -> None:
    def path(**config: Any) -> list[str]:
        planned = plan(device="cpu", python="python3.12", **config)
        assert guard_of(planned)[0] == "skyctl_inside.guard.Guard"
        assert value_of(planned.servers[0], "-m") == "vllm.entrypoints.openai.api_server"
        return planned.servers[0].env["PYTHONPATH"].split(":")

    (alone,) = path()
    assert (Path(alone) / "skyctl_inside.py").is_file()
    assert path(environ={"PYTHONPATH": "/theirs"}) == [alone, "/theirs"]
    assert path(environ={"PYTHONPATH": "/theirs"}, env={"PYTHONPATH": "/file"}) == [alone, "/file"]


def test_servers_that_unpickle_always_ask_for_the_token() -> None:
    (ipc,) = plan(machine_gpus=gpus(1)).servers
    assert ipc.env["VLLM_ALLOW_INSECURE_SERIALIZATION"] == "1"
    assert "SKYCTL_CONTROL_TOKEN" in ipc.env
    open_fleet = plan(machine_gpus=gpus(1), auth="none")
    assert open_fleet.servers[0].backend == ""
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in open_fleet.servers[0].env
    assert any("weights go by disk" in warning for warning in open_fleet.warnings)
    for transport in ("nccl", "disk"):
        (other,) = plan(machine_gpus=gpus(2), weight_transfer={"transport": transport}).servers
        assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in other.env


def test_code_of_a_model_is_trusted_only_where_the_file_says_so() -> None:
    (server,) = plan(device="cpu").servers
    assert not any("trust" in argument for argument in server.argv)
    (told,) = plan(device="cpu", args={"trust-remote-code": True}).servers
    assert "--trust-remote-code" in told.argv
