"""One case per seed for each kind of input; what a case may do is in `run_case`."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import signal
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, get_type_hints

import httpx
import yaml

from skyctl.checkpoints.checkpoint import INDEX_NAME, read_checkpoint
from skyctl.checkpoints.header import read_header
from skyctl.core.verb_table import Verb
from skyctl.engines.vllm.router import RouterClient, parse_router_metrics
from skyctl.engines.vllm.server import VLLMServer, parse_metrics
from skyctl.errors import FleetFileError, SkyctlError
from skyctl.fleetfile.load import parse_fleet
from skyctl.generate.prompts import Cut, read_pieces
from skyctl.http.client import ControlClient, error_text
from skyctl.http.target import ServerTarget
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.identity import own_identity
from skyctl.store.in_doubt import close_orphans, in_doubt, touch
from skyctl.store.journal import JobEvent
from skyctl.store.processes import ProcessRow
from skyctl.store.state import FleetState
from skyctl.supervisor.interface import SupervisorClient, SupervisorService, own_handlers
from tests.fuzz.mutation import as_json, broken, mutated, nasty
from tests.stub.through_httpx import ThroughHttpx
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

CASE_TIMEOUT_S = 10.0
_FLEET_FILE = Path(__file__).parents[2] / "fleet.yaml.example"
Case = Callable[[random.Random, Path], None]


class TooSlow(Exception):
    """A case takes too much of a processor."""


class OverRead(Exception):
    """Something outside the input was accepted as part of it."""


def run_case(kind: str, seed: int, directory: Path, *, timeout_s: float = CASE_TIMEOUT_S) -> bool:
    """Run one case in an empty directory; whether the input was accepted.

    A SkyctlError is a refusal. Everything else that is raised is a fault of ours, as is a case that
    takes more than `timeout_s` seconds of a processor.
    """

    def too_slow(_: int, frame: FrameType | None) -> None:
        raise TooSlow(f"{kind} {seed}: in {frame}")

    before = signal.signal(signal.SIGPROF, too_slow)
    signal.setitimer(signal.ITIMER_PROF, timeout_s)
    try:
        CASES[kind](random.Random(f"{kind}/{seed}"), directory)
    except SkyctlError as error:
        assert error.message, "a refusal says why"
        return False
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return True


# --- fleet files ---------------------------------------------------------------------------------

_FLEET = {
    "name": "f", "model": "./m", "replicas": 2, "device": "cpu", "ports": [8000, 8001],
    "health": {"interval_s": 1, "timeout_s": 2, "startup_timeout_s": 20},
    "restart": {"policy": "never", "max_restarts": 3}, "env": {"A": "1"},
    "args": {"max-model-len": 2048}, "router": {"policy": "random", "request_timeout_s": 5},
    "weight_transfer": {"transport": "shm", "chunk_size": "64MiB", "update_timeout_s": 10},
}  # fmt: skip
WRITTEN = yaml.safe_dump(_FLEET).encode()
_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in itertools.pairwise("abcdefghi")
)
_LOOP = "name: f\nmodel: &m {a: *m}\nenv: &e\n  <<: *e\n"


def fleet_file(dice: random.Random, directory: Path) -> None:
    what = dice.randrange(10)
    if what < 5:
        text = as_json(dice, mutated(dice, _FLEET)).decode("utf-8", "replace")
    elif what < 8:
        # the example has every key, and takes a hundred times as long
        whole = _FLEET_FILE.read_bytes() if dice.random() < 0.05 else WRITTEN
        text = broken(dice, whole).decode("utf-8", "replace")
    elif what == 8:
        deep = dice.choice((10, 100, 1000, 20_000))
        text = dice.choice(("[", "{a: ", "- ", "a:\n ", "? ")) * deep
    else:
        text = dice.choice((_BOMB, _LOOP, _BOMB + _LOOP, "", "---\n---\n", "\x00", "%YAML 9.9\n"))
    path = directory / "fleet.yaml"
    try:
        parse_fleet(text, path, {"HOME": "/h", "A": "\n", "B": "*x"})
    except FleetFileError as error:
        if not error.message.startswith(f"{path}:"):
            raise AssertionError(f"no place in {error.message[:200]!r}") from error
        raise


# --- safetensors ---------------------------------------------------------------------------------


def _header() -> dict[str, Any]:
    return {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
        "b": {"dtype": "BF16", "shape": [8], "data_offsets": [32, 48]},
        "c": {"dtype": "F8_E4M3", "shape": [], "data_offsets": [48, 49]},
        "d": {"dtype": "I64", "shape": [0, 3], "data_offsets": [49, 49]},
    }


def safetensors_header(dice: random.Random, directory: Path) -> None:
    header = _header()
    raw = as_json(dice, mutated(dice, header) if dice.random() < 0.8 else header)
    length = len(raw)
    if dice.random() < 0.2:
        length = dice.choice((0, 1, length - 1, length + 1, 2**31, 2**32, 2**63, 2**64 - 1, 10**8))
    data = struct.pack("<Q", length) + raw + bytes(49 + dice.choice((0, 0, 0, 1, -1)))
    if dice.random() < 0.3:
        data = broken(dice, data)
    file = directory / "model.safetensors"
    file.write_bytes(data)
    shard, tensors = read_header(file)
    for tensor in tensors:
        if (
            tensor.begin < 8
            or tensor.nbytes < 0
            or tensor.begin + tensor.nbytes > shard.identity.size
        ):
            raise OverRead(f"{tensor} in a file of {shard.identity.size} bytes")


def safetensors_index(dice: random.Random, directory: Path) -> None:
    checkpoint = write_checkpoint(directory / "c", tiny_tensors(1), shards=3)
    index = checkpoint / INDEX_NAME
    value = json.loads(index.read_text())
    names = sorted(set(value["weight_map"].values()))
    what = dice.randrange(8)
    if what < 4:
        index.write_bytes(as_json(dice, mutated(dice, value)))
    elif what == 4:
        index.write_bytes(broken(dice, index.read_bytes()))
    elif what == 5:
        tensor = dice.choice(sorted(value["weight_map"]))
        outside = write_checkpoint(directory / "other", tiny_tensors(2)) / "model.safetensors"
        value["weight_map"][tensor] = dice.choice(
            (f"../{outside.parent.name}/{outside.name}", str(outside), "..", ".", "./" + names[0],
             "sub/x.safetensors", names[0] + "\x00", "x" * 300)
        )  # fmt: skip
        index.write_text(json.dumps(value))
    elif what == 6:
        _replace(dice, checkpoint / dice.choice(names), directory)
    else:
        _replace(dice, index, directory)
    if dice.random() < 0.15:
        config = checkpoint / "config.json"
        config.write_bytes(broken(dice, as_json(dice, mutated(dice, {"model_type": "x"}))))
    read = read_checkpoint(str(checkpoint))
    for tensor in read.tensors:
        shard = read.shards[tensor.shard]
        if tensor.begin + tensor.nbytes > shard.identity.size:
            raise OverRead(f"{tensor} in {shard}")


def _replace(dice: random.Random, file: Path, directory: Path) -> None:
    """Something else than a plain file of weights at its place."""
    file.unlink()
    what = dice.randrange(5)
    if what == 0:
        file.mkdir()
    elif what == 1:
        file.symlink_to(file.name)
    elif what == 2:
        file.symlink_to(directory / "nowhere")
    elif what == 3:
        file.write_bytes(b"")


# --- state files ---------------------------------------------------------------------------------

_TEXT_COLUMNS = (
    ("processes", "gpus"), ("processes", "descendants"), ("processes", "pid"),
    ("processes", "create_time"), ("processes", "port"), ("processes", "phase"),
    ("servers", "sleep_level"), ("servers", "paused"), ("servers", "weight_version"),
    ("jobs", "request"), ("in_doubt", "half_updated"), ("jobs", "error"), ("jobs", "result"),
    ("jobs", "owner"), ("jobs", "kind"), ("jobs", "state"), ("jobs", "created_at"),
    ("job_events", "data"), ("job_events", "kind"), ("pushes", "result"), ("pushes", "ok"),
)  # fmt: skip


def state_file(dice: random.Random, directory: Path) -> None:
    path = directory / "home" / "state.sqlite"
    _write_state(path, directory)
    what = dice.randrange(4)
    if what == 0:
        path.write_bytes(broken(dice, path.read_bytes()))
    elif what == 1:
        data = bytearray(path.read_bytes())
        for _ in range(dice.randint(1, 30)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(data)
    else:
        _spoil_rows(dice, path)
    if dice.random() < 0.1:
        path.with_name(path.name + "-wal").write_bytes(dice.randbytes(200))
    with FleetState(path) as state:
        refused = None
        for read in _state_reads(state):
            try:
                read()
            except SkyctlError as error:
                refused = error
        if refused is not None:
            raise refused


def _write_state(path: Path, directory: Path) -> None:
    template = directory.parent / "template.sqlite"
    path.parent.mkdir(mode=0o700)
    if not template.exists():
        with FleetState(path) as state:
            own = own_identity()
            state.save_process(
                ProcessRow(
                    "f-0", "server", "running", "t", own, "h", "127.0.0.1", 1, (0,), 1.0, (own,)
                )
            )
            state.update_server("f-0", paused=True, weight_version="v")
            state.set_weights(FleetWeights("v", "/c", "d"))
            touch(state, "f-0")
            state.update_server("f-0", weights_awake=True)
            job = state.journal.begin("push", {"checkpoint": "/c"})
            state.journal.add_events(job.id, JobEvent.stage("pause"))
            state.journal.add_events(job.id, JobEvent.server("f-0", "pausing"))
            state.journal.record_push(
                job.id, ok=True, version="v", checkpoint="/c", checkpoint_digest="d", result={}
            )
            state.add_event("fleet", "up")
        shutil.copy(path, template)
    shutil.copy(template, path)


def _spoil_rows(dice: random.Random, path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for _ in range(dice.randint(1, 3)):
            if dice.random() < 0.25:
                key = dice.choice(("weights", "kept_weights", "ports"))
                value = as_json(dice, nasty(dice)).decode("utf-8", "replace")
                connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))
                continue
            table, column = dice.choice(_TEXT_COLUMNS)
            spoiled: Any = as_json(dice, nasty(dice))
            if dice.random() < 0.7:
                spoiled = spoiled.decode("utf-8", "replace")
            connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ?", (spoiled,))
    except sqlite3.IntegrityError:
        return  # such a value cannot get into the file
    finally:
        connection.close()


def _state_reads(state: FleetState) -> list[Callable[[], object]]:
    journal = state.journal
    return [
        state.processes,
        state.servers,
        state.weights,
        state.checkpoints,
        state.events,
        lambda: in_doubt(state),
        lambda: [one.to_json() for one in journal.jobs()],
        lambda: journal.events("push-1"),
        lambda: [one.to_json() for one in journal.pushes()],
        journal.orphans,
        lambda: close_orphans(state),
        lambda: state.update_server("f-0", paused=False),
        lambda: state.update_server("f-0", weights_awake=False),
    ]


# --- bodies of answers ---------------------------------------------------------------------------

_ANSWERS: dict[str, Any] = {
    "version": {"version": "0.32.0"},
    "models": {"data": [{"id": "m"}]},
    "ranks": {"world_size": 1},
    "server_info": {"vllm_config": {"model_config": {"model": "m"}}},
    "is_paused": {"is_paused": False},
    "is_sleeping": {"is_sleeping": False},
    "wake": {"status": "awake", "tags": None},
    "reset_prefix_cache": {"success": True},
    "weight_version": {"weight_version": "v"},
    "weight_checksums": {"checksums": {"w": "1"}},
    "collective_rpc": {"results": ["1"]},
}
_EVENT = {
    "choices": [
        {"index": 0, "text": "a", "token_ids": [1], "finish_reason": None, "logprobs": {
            "token_logprobs": [-0.5]}, "prompt_token_ids": [1, 2]}
    ],
    "error": {"message": "m", "code": 400},
}  # fmt: skip
_PAGE = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.5
vllm:prompt_tokens_total{engine="0"} 1e308
vllm:prompt_tokens_total{engine="1"} 1e308
vllm:engine_sleep_state{engine="0",sleep_state="awake"} 1.0
vllm_router_requests_total{route="/v1"} 1e308
vllm_router_requests_total{route="/v2"} 1e308
"""
_SUPERVISED = {"error": {"kind": "ConflictError", "message": "m", "hint": "h", "details": {}}}


def _body(dice: random.Random, value: Any) -> bytes:
    raw = as_json(dice, mutated(dice, value) if dice.random() < 0.8 else nasty(dice))
    return broken(dice, raw) if dice.random() < 0.2 else raw


def server_answer(dice: random.Random, directory: Path) -> None:
    what = dice.randrange(8)
    if what < 4:
        asyncio.run(_control_answer(dice))
    elif what == 4:
        asyncio.run(_event_stream(dice))
    elif what == 5:
        page = broken(dice, _PAGE.encode()).decode("utf-8", "replace")
        parse_metrics(page)
        parse_router_metrics(page)
    elif what == 6:
        error_text(_body(dice, _SUPERVISED).decode("utf-8", "replace"))
    else:
        asyncio.run(_supervisor_answer(dice, directory))


async def _control_answer(dice: random.Random) -> None:
    name = dice.choice((*sorted(_ANSWERS), "router"))
    status = dice.choice((200, 200, 200, 404, 500, 302, 204))
    body = _body(dice, _ANSWERS.get(name, {"urls": ["http://127.0.0.1:1"]}))
    transport = ThroughHttpx(httpx.MockTransport(lambda _: httpx.Response(status, content=body)))
    async with ControlClient(transport=transport) as client:
        if name == "router":
            await RouterClient(client, "http://127.0.0.1:1").workers()
            return
        server = VLLMServer(client, ServerTarget("f-0", "http://127.0.0.1:1", None), timeout_s=5)
        arguments = ("skyctl_weight_digest",) if name == "collective_rpc" else ()
        await getattr(server, name)(*arguments)


async def _event_stream(dice: random.Random) -> None:
    event = dict(_EVENT)
    if dice.random() < 0.8:
        del event["error"]
    bodies = [_body(dice, event).decode("utf-8", "replace") for _ in range(3)]

    async def lines() -> Any:
        for body in bodies:
            for line in f"data: {body}".split("\n"):
                yield line

    try:
        async for piece in read_pieces(lines()):
            assert all(type(token) is int for token in piece.token_ids)
    except Cut:
        return


async def _supervisor_answer(dice: random.Random, directory: Path) -> None:
    status = dice.choice((200, 404, 409, 500))
    body = _body(dice, _SUPERVISED)
    transport = ThroughHttpx(httpx.MockTransport(lambda _: httpx.Response(status, content=body)))
    async with SupervisorClient("f", transport) as client:
        await client.status()


# --- bodies of requests --------------------------------------------------------------------------

_PLAN = {
    "name": "f", "device": "cpu", "model_path": "/m", "served_model_name": "m", "servers": [],
    "router": None, "config": {"name": "f", "model": "/m"}, "base_dir": "/", "python": "python",
    "free_gpus": [],
}  # fmt: skip
_REQUESTS: dict[str, Any] = {
    "reconcile": {"plan": _PLAN, "kind": "up"},
    "adopt": {"plan": _PLAN},
    "recover": {"timeout_s": 1.0},
    "restart": {"servers": ["f-0"]},
    "undo": {},
    "down": {"drain_timeout_s": 0.0},
    "pause": {"mode": "keep", "servers": ["f-0"], "timeout_s": 1.0},
    "sleep": {"level": 1, "timeout_s": 1.0},
    "wake": {"tags": ["weights"], "timeout_s": 1.0},
    "x": {"timeout_s": 1.0},
    "start_push": {"checkpoint": "/c", "transport": "shm", "chunk_size": 5},
    "job_changes": {"job": "push-1", "after": 3, "wait_s": 1.0},
    "cancel_job": {"job": "push-1"},
    "logs": {"names": ["f-0"], "lines": 5},
    "status": {"fresh": False, "operation": 3},
    "verify_weights": {},
}


def api_body(dice: random.Random, directory: Path) -> None:
    asyncio.run(_api_body(dice, directory))


async def _api_body(dice: random.Random, directory: Path) -> None:
    from skyctl.supervisor.api import make_app
    from skyctl.supervisor.wire import VERSION_HEADER, own_version

    path = dice.choice(sorted(_REQUESTS))
    version = own_version() if dice.random() < 0.95 else dice.choice(("x", "0/0", "/", "9/9/9"))
    transport = httpx.ASGITransport(make_app(own_handlers(_Unmoved()), ready=_Unmoved))
    async with httpx.AsyncClient(transport=transport, base_url="http://supervisor") as client:
        answer = await client.post(
            f"/v1/{path}", content=_body(dice, _REQUESTS[path]), headers={VERSION_HEADER: version}
        )
    assert answer.status_code in (200, 404, 409), answer.text
    if answer.status_code != 200:
        raise SkyctlError(answer.json()["error"]["message"])


class _Unmoved(SupervisorService):
    """Takes what the API hands on, of the types it promised, and does nothing."""

    async def _ask(self, verb: Verb[Any, Any], request: Any, result: Any) -> Any:
        for name, kind in get_type_hints(type(request)).items() if request is not None else ():
            if isinstance(kind, type):
                assert isinstance(getattr(request, name), kind | int), (verb.name, name)


CASES: dict[str, Case] = {
    "fleet file": fleet_file,
    "safetensors header": safetensors_header,
    "safetensors index": safetensors_index,
    "state file": state_file,
    "answer of a server": server_answer,
    "body of a request": api_body,
}
