"""A trainer that knows one URL: vLLM's RL API for a whole fleet, with the fleet's transaction."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyctl.launch.local.host import free_port
from tests.faults.stub_fleet import StubFleet
from tests.faults.trainer_fleet import BOUND_S, Fleet, trainer_fleet
from tests.pages import block
from tests.stub.rows import trainers_update
from tests.stub.url_trainer import CALLS, body
from tests.unit.adapters.files import lora, make_adapter
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

UPDATE = ("start_weight_update", "update_weights", "finish_weight_update")


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """With the `auth` of the test's parameter, none if it has none."""
    auth = getattr(request, "param", "none")
    with trainer_fleet(tmp_path, free_port("127.0.0.1"), auth) as fleet:
        yield fleet


def test_an_update_by_one_url_is_the_fleets_own(fleet: Fleet) -> None:
    before = {state["digest"] for state in fleet.states()}
    assert fleet.get("get_world_size").json() == {"world_size": 2}
    workers = fleet.get("v1/rl/workers").json()["workers"]
    assert [(worker["rank_offset"], worker["workers"]) for worker in workers] == [(1, 1), (2, 1)]
    for call in CALLS[:3]:
        fleet.call(call)
    states = fleet.states()
    assert [state["rank_offset"] for state in states] == [1, 2]
    assert all(state["paused"] and state["update_open"] for state in states)
    refused = fleet.json("pause", expect=1)
    assert "push-1" in refused["error"]["message"]
    assert fleet.post("resume").status_code == 409, "only the update's end thaws"
    done = fleet.call("finish_weight_update")
    assert done["weight_version"] == "step-1" and done["freeze_window_s"] > 0
    states = fleet.whole()
    assert {state["weight_version"] for state in states} == {"step-1"}
    assert {state["digest"] for state in states} != before
    version = fleet.get("v1/version", params={"wait": "step-1"}).json()
    assert version["version"] == "step-1" and len(version["servers"]) == 2
    code, errors = fleet.trainer(version="step-1-again")  # as before a trainer's first step
    assert code == 0, errors
    assert {state["digest"] for state in fleet.whole()} == {state["digest"] for state in states}
    fleet.call("start_weight_update")
    assert "brought no weights" in fleet.post("finish_weight_update").text
    fleet.until("ready")
    fleet.call("start_weight_update")
    fleet.call("update_weights", seed=2)
    unlabelled = fleet.post("finish_weight_update").json()
    assert unlabelled["weight_version"] == "push-4"


@pytest.mark.parametrize("midway", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_a_trainer_that_dies_at_a_call_is_undone(fleet: Fleet, call: str, midway: bool) -> None:
    before = {state["digest"] for state in fleet.states()}
    url = next(iter(fleet.replicas().values()))["url"]
    if midway:
        with fleet.delayed(call, 3.0):
            called = fleet.calls(url, call)
            process = fleet.train_begun()
            fleet.until_called(url, call, called)
            process.kill()
            process.communicate()
        assert process.returncode == -signal.SIGKILL
    else:
        code, errors = fleet.trainer("--dies-at", call)
        assert code == -signal.SIGKILL, errors
    committed = call == "finish_weight_update"
    if committed:
        fleet.get("v1/version", params={"wait": "step-1"})
    states = fleet.whole()
    assert ({state["digest"] for state in states} != before) == committed
    if call in UPDATE[:2] and not midway:
        message = fleet.json("jobs")["data"]["jobs"][0]["error"]["message"]
        assert any(words in message for words in ("the trainer (pid", "hung up"))
    code, errors = fleet.trainer(seed=2, version="step-2")
    assert code == 0, errors
    assert {state["weight_version"] for state in fleet.whole()} == {"step-2"}


@pytest.mark.parametrize("call", UPDATE)
def test_a_server_that_dies_fails_the_update_with_a_sentence(fleet: Fleet, call: str) -> None:
    row = fleet.replicas()["stubs-1"]
    with fleet.delayed(call, 10.0, "stubs-1"):
        called = fleet.calls(row["url"], call)
        process = fleet.train_begun()
        fleet.until_called(row["url"], call, called)
        os.kill(row["pid"], signal.SIGKILL)
        _, errors = process.communicate(timeout=BOUND_S)
    assert process.returncode == 1
    assert "stubs-1" in json.loads(errors)["error"]["message"]
    states = fleet.whole()
    # at the finish, the other has verified weights, which no file has: it writes them
    committed = "step-1" if call == "finish_weight_update" else "default"
    assert {state["weight_version"] for state in states} == {committed}
    code, errors = fleet.trainer(seed=2, version="step-2")
    assert code == 0, errors
    assert {state["weight_version"] for state in fleet.whole()} == {"step-2"}


def test_a_restarted_server_is_not_in_the_trainers_group(fleet: Fleet) -> None:
    fleet.call("init_weight_transfer_engine")
    os.kill(fleet.replicas()["stubs-0"]["pid"], signal.SIGKILL)
    deadline = time.monotonic() + BOUND_S
    while fleet.replicas()["stubs-0"]["restarts"] < 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    fleet.until("ready")
    refused = fleet.post("start_weight_update")
    assert refused.status_code == 409
    assert "stubs-0 left the trainer's group" in refused.json()["error"]["message"]
    code, errors = fleet.trainer()
    assert code == 0, errors


def test_verbs_reach_every_server(fleet: Fleet) -> None:
    assert fleet.get("is_paused").json() == {"is_paused": False}
    assert fleet.post("pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    assert fleet.get("is_paused").json() == {"is_paused": True}
    assert [state["paused"] for state in fleet.states()] == [True, True]
    code, errors = fleet.trainer()  # a trainer that pauses and resumes itself
    assert code == 0, errors
    assert [state["paused"] for state in fleet.states()] == [True, True]
    assert fleet.post("resume").json() == {"status": "resumed"}
    assert fleet.post("sleep?level=1").json()["status"] == "sleeping"
    assert fleet.get("is_sleeping").json() == {"is_sleeping": True}
    assert fleet.post("wake_up").json()["status"] == "awake"
    assert fleet.post("reset_prefix_cache").json() == {"success": True}
    assert fleet.get("version").json() == {"version": "0.32.0"}
    assert fleet.get("server_info").json()["vllm_config"]["weight_transfer_config"]
    fleet.whole()


@pytest.mark.parametrize("level", [1, 2])
def test_weights_that_wake_alone_are_updated_before_the_rest_wakes(
    fleet: Fleet, level: int
) -> None:
    """As a trainer on the servers' GPUs does it."""
    before = {state["digest"] for state in fleet.states()}
    fleet.post(f"sleep?level={level}")
    fleet.call("init_weight_transfer_engine")
    refused = fleet.post("start_weight_update")
    assert refused.status_code == 400 and "asleep" in refused.json()["error"]["message"]
    assert fleet.post("wake_up?tags=weights").status_code == 200
    for call in UPDATE:
        fleet.call(call)
    assert {state["weight_version"] for state in fleet.states()} == {"step-1"}
    assert all(state["asleep"] == ["kv_cache"] for state in fleet.states())
    assert fleet.post("wake_up?tags=kv_cache").status_code == 200
    assert {state["digest"] for state in fleet.whole()} != before


@pytest.mark.parametrize("load", ["v1/load_lora_adapter", "skyrl/v1/load_lora_adapter"])
def test_adapters_and_demanded_versions_reach_every_server(tmp_path: Path, load: str) -> None:
    more = "lora: {max_rank: 8}\nrouter: {enabled: false}\n"
    adapter = {"lora_name": "tuned", "lora_path": str(tmp_path / "x")}
    make_adapter(tmp_path / "x", lora("base_model.model.model.layers.0.mlp.up_proj"))
    with trainer_fleet(tmp_path, free_port("127.0.0.1"), more=more) as fleet:
        assert fleet.post(load, adapter).status_code == 200
        assert ["tuned" in state["adapters"] for state in fleet.states()] == [True, True]
        again = fleet.post(load, adapter)
        assert (again.status_code == 200) == load.startswith("skyrl"), again.text
        assert fleet.post("v1/unload_lora_adapter", {"lora_name": "tuned"}).status_code == 200
        assert [state["adapters"] for state in fleet.states()] == [{}, {}]
        code, errors = fleet.trainer(version="step-1")
        assert code == 0, errors
        body = {"model": fleet.json("urls")["data"]["model"], "prompt": "ab", "max_tokens": 2}
        for demand, label, status in (
            ("exact", "step-1", 200),
            ("min", "step-1", 200),
            ("exact", "base", 409),
            ("min", "step-9", 409),
        ):
            headers = {f"x-weight-version-{demand}": label}
            for _ in range(2):  # each server
                answer = fleet.post("v1/completions", body, headers=headers)
                assert answer.status_code == status, (demand, label, answer.text)
                told = answer.headers.get("x-weight-version-begin")
                assert told == "step-1" if status == 200 else "retry-after" in answer.headers
        late = fleet.get("v1/version", params={"wait": "step-9", "timeout_s": 0})
        assert late.status_code == 409 and "step-9" in late.json()["error"]["message"]


def test_skyrls_calls_of_its_workers_are_the_fleets_update(fleet: Fleet) -> None:
    """`/collective_rpc` of its `remote_inference_client.py`; no other method gets through."""

    def rpc(method: str, **kwargs: Any) -> httpx.Response:
        return fleet.post("collective_rpc", {"method": method, "kwargs": kwargs})

    info = trainers_update(1)
    assert rpc("update_weights_nccl", update_info=info).status_code == 409, "none is open"
    fleet.call("init_weight_transfer_engine")
    assert rpc("skyrl_start_weight_update", is_checkpoint_format=True).json()["results"]
    assert all(state["paused"] and state["update_open"] for state in fleet.states())
    for method in ("update_weights_ipc", "reload_weights", "skyctl_weight_digest", ""):
        refused = rpc(method, update_info=info)
        assert refused.status_code == 400, refused.text
        assert "past the update" in refused.json()["error"]["message"]
    assert rpc("update_weights_nccl").status_code == 400
    assert rpc("update_weights_nccl", update_info=info).status_code == 200
    assert rpc("skyrl_finish_weight_update").status_code == 200
    assert {state["weight_version"] for state in fleet.whole()} == {"push-1"}


def test_prime_rls_calls_push_a_checkpoint(fleet: Fleet, tmp_path: Path) -> None:
    """`prime_rl/utils/client.py` pauses, names a directory and resumes, whatever the answer is."""
    page = tomllib.loads(block("trainers.md", "### prime-rl", "toml"))
    (url,) = page["orchestrator"]["model"]["client"]["admin_base_url"]
    assert url.replace("trainer:TOKEN@", "").replace("8791", str(fleet.port)) == fleet.url
    assert page["weight_broadcast"]["type"] == "filesystem"
    written = write_checkpoint(tmp_path / "step_3", tiny_tensors(3))
    (written / "NCCL_READY").touch()
    before = {state["digest"] for state in fleet.states()}
    for directory, status in (("/none", 404), ("step_3", 400), (None, 400), (str(written), 200)):
        assert fleet.post("pause?mode=keep&clear_cache=false").status_code == 200
        answer = fleet.post("update_weights", {"weight_dir": directory})
        assert answer.status_code == status, answer.text
        assert all(state["paused"] for state in fleet.states())
        assert fleet.post("resume").status_code == 200
        changed = {state["digest"] for state in fleet.whole()} != before
        assert changed == (status == 200)
    assert answer.json()["weight_version"].startswith("step_3@")
    assert fleet.get("v1/version").json()["version"] == answer.json()["weight_version"]


@pytest.mark.parametrize("fleet", ["all", "control"], indirect=True)
def test_the_fleet_url_wants_the_fleets_keys(fleet: Fleet, request: pytest.FixtureRequest) -> None:
    token, fleet.token = fleet.token, ""
    for call in CALLS:
        assert fleet.post(call, body(call, "x", 1)).status_code == 401
    assert fleet.post("pause").status_code == 401
    assert fleet.get("health").status_code == 200
    model = {"model": fleet.json("urls")["data"]["model"], "prompt": "ab", "max_tokens": 2}
    inference = fleet.post("v1/completions", model)
    auth = request.node.callspec.params["fleet"]
    assert inference.status_code == (401 if auth == "all" else 200), inference.text
    bearer = {"Authorization": f"Bearer {token}"}
    assert fleet.post("v1/completions", model, headers=bearer).json()["choices"]
    fleet.token = token
    answer = fleet.post("v1/completions", {**model, "stream": True})
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
    code, errors = fleet.trainer()
    assert code == 0, errors
    assert fleet.get("is_paused").json() == {"is_paused": False}


def test_the_port_may_be_taken(tmp_path: Path) -> None:
    fleet = StubFleet(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fleet.write(replicas=1, extra=f"auth: none\ntrainer: {{port: {port}}}\n")
        fleet.run("up")
        reasons = fleet.json("status")["data"]["reasons"]
    assert f"the fleet URL does not listen at 127.0.0.1:{port}" in json.dumps(reasons)
    fleet.run("up")
    assert httpx.get(f"http://127.0.0.1:{port}/is_paused", trust_env=False).status_code == 200
    fleet.run("down")
