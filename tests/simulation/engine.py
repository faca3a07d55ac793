"""A vLLM server as skyctl sees it: its routes, scheduler, memory and update sessions.

tests/integration/test_contract_stub.py holds this model against a real server.

    scheduler   running ⇄ paused          memory   awake → asleep {weights, kv_cache} → awake
    session     closed → open → closed; while it is open, layers without all of their tensors are
                empty, and after an update that failed the next start scrubs them and says so once;
                engines that do not scrub (`scrubs`) build on what the failed update left
    weights     per rank: tensor → value; a version is whole when all values are one snapshot's;
                while they sleep their memory is not mapped, and who touches it ends the engine
    guard       some have skyctl's own, as far as it is about who froze them
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from skyctl.engines.inside.guard import HOLDER_HEADER, VLLM, _Freeze
from skyctl.engines.vllm.server import METRICS
from skyctl.http.transport import Request
from tests.simulation.disk import Checkpoints
from tests.simulation.kernel import Kernel, Process
from tests.simulation.loop import VirtualLoop
from tests.simulation.network import _NOBODY, Reply, body
from tests.simulation.sender import Memory
from tests.stub import rows

if TYPE_CHECKING:
    from tests.simulation.workers import Workers

MEMORY = frozenset({"weights", "kv_cache"})
STRANGER = "stranger"
"""The label of a process that knows nothing of skyctl."""
GARBAGE = -1
CHANGING = (
    "/pause",
    "/resume",
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
)
"""Requests that change a server."""

Weights = dict[str, int]


class Died(Exception):
    """The engine has ended, and answers nothing."""


class Refused(Exception):
    """vLLM would raise here; the answer has this status and text."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Frailty:
    """What may go wrong inside an engine: probabilities per call."""

    update_fails: float = 0.0
    corrupts: float = 0.0
    """Half of these change nothing that a comparison of rows would read."""
    digest_fails: float = 0.0
    sticks: float = 0.0
    slow: float = 0.02


@cache
def _query(text: str) -> Mapping[str, list[str]]:
    return parse_qs(text)


class _Engine:
    """Awaited behind the guard: gives the status and body of what the engine answers."""

    def __await__(self) -> Generator[None, tuple[int, bytes], tuple[int, bytes]]:
        return (yield)


class Guarded:
    """A request on its way through the guard to the engine and back."""

    def __init__(self, freeze: _Freeze, request: Request, reply: Reply) -> None:
        path, _, query = request.path.partition("?")
        headers = [(key.encode(), value.encode()) for key, value in request.headers.items()]
        scope = {"type": "http", "path": path, "query_string": query.encode(), "headers": headers}
        self._reply = reply
        self._answer = (500, b"")
        self._way: Coroutine[Any, Any, None] = freeze.passing(
            self._engine, scope, _nothing, self._send
        )
        self.passes = self._step(None)

    def __call__(self, status: int, body: bytes) -> None:
        """The engine answers."""
        self._step((status, body))

    def _step(self, answered: tuple[int, bytes] | None) -> bool:
        """Go on until the engine is to act; False once the request is answered."""
        try:
            self._way.send(answered)
        except StopIteration:
            self._reply(*self._answer)
            return False
        return True

    async def _engine(self, scope: Any, receive: Any, send: Any) -> None:
        status, answer = await _Engine()
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body", "body": answer})

    async def _send(self, message: Mapping[str, Any]) -> None:
        status, answer = self._answer
        self._answer = message.get("status", status), message.get("body", answer)


async def _nothing() -> Any: ...


class Engine:
    """One server. `before(engine, path, caller)` is called before every change of its state,
    `watch(engine, what)` after it."""

    def __init__(
        self,
        name: str,
        url: str,
        model: str,
        base: Weights,
        *,
        ranks: int,
        loop: VirtualLoop,
        kernel: Kernel,
        dice: Random,
        frailty: Frailty,
        memories: Mapping[int, Memory],
        checkpoints: Checkpoints,
        watch: Callable[[Engine, str], None],
        before: Callable[[Engine, str, Process | None], None],
        scrubs: bool = True,
        guarded: bool = False,
    ) -> None:
        self.guarded = guarded
        self.named = False  # its guard knows who froze it: the fleet of the last pause
        self.name, self.url, self.model, self.ranks = name, url, model, ranks
        self.process: Process | None = None
        self.held: Callable[[], bool] = lambda: False
        self._base = base
        self._loop, self._kernel, self._dice = loop, kernel, dice
        self._frailty = frailty
        self._memories = memories
        self._checkpoints = checkpoints
        self._watch = watch
        self._before = before
        self._scrubs = scrubs
        self.served_model = "sim"
        self.workers: Workers | None = None  # skyctl's methods for GPUs
        self.users = True  # it may have requests to end, or to freeze
        self.ready_at = 0.0
        self._reset()

    @property
    def protected(self) -> bool:
        """Whether its guard refuses strangers while it is frozen: a fleet that could not write its
        own name freezes without one."""
        return self.guarded and self.named

    def start(self, process: Process, ready_in_s: float = 0.0) -> None:
        """A fresh process: base weights, running."""
        self.process = process
        self.ready_at = self._loop.now + ready_in_s
        self._reset()
        self._watch(self, "starts")

    def _reset(self) -> None:
        self.weights: list[Weights] = [dict(self._base) for _ in range(self.ranks)]
        self.label = "default"
        self._freeze = _Freeze(VLLM)
        self.paused = False
        self.asleep: set[str] = set()
        self.sleep_level = 0
        self.meddled_with = False  # another program has sent it to sleep, or woken a part of it
        self.meddled_with_at = 0.0
        self.slept_by: Process | None = None
        self.open = False
        self.half_open = False
        self.reloading = False
        self.received: set[str] = set()
        self.damaged = self.completed = False  # by a fault of ours; all of its tensors came
        self.counted: set[str] = set()  # as loaded, by an update that failed
        self.frozen_for_push = False
        self.thawed_by: Process | None = None
        self.loading_by: Process | None = None  # from the start of its session to the label
        self.begun_at = 0.0  # the session before or now
        self.answered = False  # in that time
        self.looked_at = 0.0  # by its loader, whether it is paused and has generated
        self.seen_at = 0.0  # by any of ours but a push, of which the fleet's recovery knows nothing
        self.thawed_at = 0.0
        self.meddled_at = 0.0  # thawed by another program
        self.loaded_at = 0.0  # the session was closed
        self.unseen = False  # it was thawed so after the last look, which was after the load
        self.generated = 0  # tokens: whenever it serves, it has requests
        self.announced: set[str] = set()
        self.next_chunk = 0
        self.sender = 0
        self.owner: Process | None = None  # of the session
        self.requests = 0  # frozen in it, holding blocks
        self.cached: frozenset[int] = frozenset()  # values of which weights its KV blocks are
        self.busy_until = self._loop.now
        self.seen_serving = False
        if self.workers is not None:
            self.workers.reset()

    # --- what may be seen -----------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """Whether it would answer a user now."""
        process = self.process
        return (
            process is not None
            and not process.dead
            and not self.paused
            and not self.asleep
            and self._loop.now >= self.ready_at
            and not self.held()
        )

    @property
    def content(self) -> tuple[int, ...] | None:
        """The values of all tensors; None when ranks differ or layers are empty."""
        if self.half_open or self.open or self.reloading:
            return None
        first = self.weights[0]
        if any(other != first for other in self.weights[1:]):
            return None
        return tuple(first.values())

    # --- the front end --------------------------------------------------------------------------

    def receive(self, request: Request, caller: Process | None, reply: Reply) -> None:
        path, _, _ = request.path.partition("?")
        if self._loop.now < self.ready_at:
            reply(503, b"")
            return
        if path == "/health":
            reply(200, b"")
            return
        if path in ("/version", "/v1/models", "/server_info", "/metrics", "/metrics/"):
            self._note_look(reply, caller)
            reply(200, self._fact(path))
            return
        answer: Callable[[int, bytes], None] = reply
        if self.guarded:
            answer = passing = Guarded(self._freeze, request, reply)
            if not passing.passes:
                self._watch(self, f"refuses {path} of {caller}")
                return
            holder = HOLDER_HEADER in request.headers
            if path == "/pause":
                self.named = holder
            elif holder and request.path in ("/resume", "/wake_up"):
                self.named = False  # the fleet has ended its freeze; a sleep is none
        self._act(request, caller, answer, reply)

    def _act(
        self,
        request: Request,
        caller: Process | None,
        reply: Callable[[int, bytes], None],
        asked: Reply,
    ) -> None:
        """Answer a request, once all that came before it are answered."""
        path, _, query = request.path.partition("?")
        dice, loop, frailty = self._dice, self._loop, self._frailty
        takes_s = dice.random() * (1.5 if dice.random() < frailty.slow else 0.004)
        if dice.random() < frailty.sticks:
            takes_s += dice.uniform(5.0, 90.0)
        parameters = _query(query) if query else {}
        sent = json.loads(request.body) if request.body else {}
        if path == "/collective_rpc":
            takes_s += 0.05
        self.busy_until = begins = max(loop.now, self.busy_until)
        self.busy_until = begins + takes_s
        process = self.process

        def carry_out() -> None:
            if process is None or process.dead:
                return
            try:
                if sent.get("method") == "reload_weights":
                    self._reload(sent["kwargs"]["weights_path"], caller, reply)
                    return
                if self.workers is not None and self.workers.call(sent, caller, reply):
                    return
                answer = self._carry_out(path, parameters, sent, caller)
            except Died:
                return
            except Refused as error:
                told = {"message": str(error), "code": error.status}
                reply(error.status, body({"error": told}))
                return
            if path == "/pause" and parameters.get("mode") == ["wait"] and self.requests:
                loop.call_later(dice.uniform(0, 20.0), drained, context=_NOBODY)
                return
            if answer is None:
                reply(404, b'{"detail": "Not Found"}')
            else:
                if path == "/is_paused":
                    self._note_look(asked, caller)
                    pushes = caller is not None and caller.label.startswith("push")
                    if asked.heard and not pushes:
                        self.seen_at = loop.now
                reply(200, body(answer))

        def drained() -> None:
            if process is not None and not process.dead:
                self.requests = 0
                reply(200, b'{"status": "paused"}')

        loop.call_at(self.busy_until, carry_out, context=_NOBODY)

    def _fact(self, path: str) -> bytes:
        if path == "/version":
            return b'{"version": "0.32.0"}'
        if path == "/v1/models":
            return body({"data": [{"id": self.served_model}]})
        if path == "/server_info":
            config = {
                "model_config": {"model": self.model, "dtype": "torch.float32"},
                "weight_transfer_config": {"backend": "skyctl"},
            }
            return body({"vllm_config": config})
        level = self.sleep_level
        return (
            f"{METRICS[0]} {self.requests if not self.asleep else 0}\n"
            f"vllm:generation_tokens_total {self.generated}\n"
            f'vllm:engine_sleep_state{{sleep_state="awake"}} {float(level == 0)}\n'
            f'vllm:engine_sleep_state{{sleep_state="weights_offloaded"}} {float(level == 1)}\n'
            f'vllm:engine_sleep_state{{sleep_state="discard_all"}} {float(level == 2)}\n'
        ).encode()

    # --- the engine core ------------------------------------------------------------------------

    def _carry_out(
        self,
        path: str,
        parameters: Mapping[str, list[str]],
        sent: dict[str, Any],
        caller: Process | None,
    ) -> Any:
        call = self._ROUTES.get(path)
        if call is None:
            return None
        if path in CHANGING:
            self._before(self, path, caller)
            answer = call(self, parameters, sent, caller)
            self._watch(self, f"{path} of {caller}")
            return answer
        return call(self, parameters, sent, caller)

    def touch_weights(self, what: str, caller: Process | None) -> None:
        """Read or write the memory of the weights."""
        if "weights" in self.asleep:
            assert self.process is not None
            self._watch(self, f"dies: {what} of {caller} touches weights that sleep")
            self._kernel.kill(self.process, "touches memory that is not mapped")
            raise Died

    def _world_size(self, *_: Any) -> Any:
        return {"world_size": self.ranks}

    def _note_look(self, asked: Reply, caller: Process | None) -> None:
        if asked.by_push and caller is self.loading_by:
            self.looked_at = self._loop.now

    def _is_paused(self, *_: Any) -> Any:
        return {"is_paused": self.paused}

    def _is_sleeping(self, *_: Any) -> Any:
        return {"is_sleeping": self.paused or bool(self.asleep)}

    def _weight_info(self, *_: Any) -> Any:
        return {"weight_version": self.label}

    def _pause(self, parameters: Mapping[str, list[str]], *_: Any) -> Any:
        mode = parameters.get("mode", ["abort"])[0]
        if mode not in ("abort", "wait", "keep"):
            raise Refused(f"Invalid pause mode {mode}", 400)
        if not self.paused and not self.asleep:
            running = self._dice.choice((0, 0, 1, 3)) if self.users else 0
            self.requests = 0 if mode == "abort" else running
        elif mode == "abort":
            self.requests = 0
        self.paused = True
        return {"status": "paused"}

    def _resume(self, *_: Any) -> Any:
        self.generated += self.paused
        self.paused = False
        self.requests = 0
        return {"status": "resumed"}

    def _note_meddling(self, caller: Process | None) -> None:
        if caller is not None and caller.label == STRANGER:
            self.meddled_with, self.meddled_with_at = True, self._loop.now

    def _sleep(
        self, parameters: Mapping[str, list[str]], _: dict[str, Any], caller: Process | None
    ) -> Any:
        level = int(parameters.get("level", ["1"])[0])
        if level not in (0, 1, 2):
            raise Refused("Input should be less than or equal to 2", 400)
        self.paused = True
        self.requests = 0
        if level and not self.asleep:
            self._note_meddling(caller)
            self.asleep, self.sleep_level, self.slept_by = set(MEMORY), level, caller
            self.cached = frozenset()
            if level == 2:
                self.damaged |= self.open  # of its update, something is lost
                for rank in self.weights:
                    rank.update(dict.fromkeys(rank, GARBAGE))
        return {"status": "sleeping", "level": level}

    def _wake(
        self, parameters: Mapping[str, list[str]], _: dict[str, Any], caller: Process | None
    ) -> Any:
        woken = set(parameters.get("tags", ())) or MEMORY
        if self.asleep & woken:
            self._note_meddling(caller)
        self.asleep -= woken
        if self.asleep:
            return {"status": "sleeping"}
        self.sleep_level = 0
        self.paused = False
        return {"status": "awake"}

    def _reset_prefix_cache(self, parameters: Mapping[str, list[str]], *_: Any) -> Any:
        if self.requests and "reset_running_requests" not in parameters:
            return {"success": False}
        self.cached = frozenset()
        return {"success": True}

    def _init(self, _: Any, sent: dict[str, Any], caller: Process | None) -> Any:
        info = sent["init_info"]
        self.received = set()
        self.sender = int(info["endpoint"]["pid"])
        memory = self._memories.get(self.sender)
        if memory is None or memory.session != info["session"]:
            raise Refused("Worker failed with error 'the sender's memory cannot be opened'")
        self.announced = set(info["tensors"])
        return {"message": "Weight transfer initialized"}

    def _start(self, _: Any, sent: dict[str, Any], caller: Process | None) -> Any:
        if self.open:
            raise Refused("start_weight_update called while a weight update is already active")
        self.received = set()
        if self.half_open and self._scrubs:
            self.half_open = False
            raise Refused("an earlier weight update broke off half-way; start again")
        self.open, self.owner, self.next_chunk = True, caller, 0
        self.damaged = False
        return {"message": "Weight update started"}

    def _update(self, _: Any, sent: dict[str, Any], caller: Process | None) -> Any:
        if not self.open:
            raise Refused("start_weight_update must be called before update_weights.")
        self.touch_weights("an update", caller)
        info = sent["update_info"]
        try:
            if "chunk" not in info:
                raise Refused("Worker failed with error 'unexpected keyword argument'")
            if info["chunk"] != self.next_chunk:
                raise Refused(f"chunk {info['chunk']} came, {self.next_chunk} is next")
            memory = self._memories.get(self.sender)
            if memory is None or not self._kernel.alive(self.sender):
                raise Refused("the sender's memory cannot be opened")
            found = memory.slots.get(info["slot"], {})
            for name, crc in zip(info["names"], info["crc32"], strict=True):
                if found.get(name) != crc:
                    raise Refused(f"{name} was damaged on its way")
        except Refused:
            self._break_off()
            raise
        failing = self._dice.random() < self._frailty.update_fails
        broken = self._dice.randrange(self.ranks) if failing else -1
        for number, rank in enumerate(self.weights):
            if number == broken:
                rank[info["names"][0]] = GARBAGE
            else:
                loaded = zip(info["names"], info["crc32"], strict=True)
                rank.update((name, crc) for name, crc in loaded if name not in self.counted)
        if self._dice.random() < self._frailty.corrupts:
            self._corrupt(info["names"][-1])
        self.received.update(info["names"])
        self.next_chunk += 1
        if failing:
            self.damaged = True
            self._break_off()
            raise Refused("Worker failed with error 'no room'")
        return {"message": "Weights updated"}

    def _reload(
        self, path: str, caller: Process | None, reply: Callable[[int, bytes], None]
    ) -> None:
        """Load a directory's tensors, one half at the beginning, the other at the end."""
        self.touch_weights("a reload", caller)
        process = self.process
        self._before(self, "/start_weight_update", caller)
        begun = self._read(path)
        self.reloading = True
        self._watch(self, f"reload of {caller} begins")

        def end() -> None:
            if process is None or process.dead:
                return
            self.reloading = False
            try:
                ended = self._read(path)
                names = list(ended)
                fails = self._dice.random() < self._frailty.update_fails
                if fails:
                    ended[names[-1]] = GARBAGE
                half = names[: len(names) // 2]
                for rank in self.weights:
                    rank.update(ended | {name: begun[name] for name in half if name in begun})
                self.damaged, self.half_open, self.counted = fails, False, set()
                if self._dice.random() < self._frailty.corrupts:
                    self._corrupt(names[-1])
                if fails:
                    raise Refused("Worker failed with error 'no room'")
            except Refused as error:
                reply(500, body({"error": {"message": str(error), "code": 500}}))
            else:
                reply(200, body({"results": [None] * self.ranks}))
            self._watch(self, f"reload of {caller} ends")

        self.busy_until = max(self.busy_until, self._loop.now + self._dice.uniform(0.02, 0.5))
        self._loop.call_at(self.busy_until, end, context=_NOBODY)

    def _read(self, path: str) -> Weights:
        try:
            return self._checkpoints.read(path)
        except (OSError, ValueError) as error:
            raise Refused(f"Worker failed with error '{error}'") from error

    def _corrupt(self, name: str) -> None:
        self.damaged = True
        value = self.weights[0][name]
        if self._dice.random() < 0.5:
            self.weights[0][name] ^= 0x10000
            return
        damaged = value ^ (self._dice.getrandbits(15) + 1)
        self._checkpoints.alike(damaged, value)
        for rank in self.weights:
            rank[name] = damaged

    def _break_off(self) -> None:
        """vLLM clears its session flag, not its layers."""
        self.open, self.owner, self.half_open = False, None, True
        if not self._scrubs:
            self.counted |= self.received
        if not self.received:
            return  # the scrub brings the old weights back
        for rank in self.weights:
            for name in rank:
                if name not in self.received:
                    rank[name] = GARBAGE

    def _finish(self, _: Any, sent: dict[str, Any], caller: Process | None) -> Any:
        if not self.open:
            raise Refused("finish_weight_update called without a matching start_weight_update.")
        received, announced, self.received = self.received, self.announced, set()
        if received:
            self.touch_weights("the end of an update", caller)
        self.counted, self.half_open = set(), False
        self.completed = bool(received) and received == announced
        if received and received != announced:  # the session stays open for another finish
            raise Refused(
                f"only {len(received)} of {len(announced)} announced tensors were received"
            )
        self.open, self.owner = False, None
        if received:
            self.sender = 0
        self.label = sent.get("weight_version") or self.label
        return {"message": "Weight update finished"}

    def _update_label(self, _: Any, sent: dict[str, Any], caller: Process | None) -> Any:
        self.label = sent["new_version"]
        if self.meddled_with_at < self.begun_at:  # it was loaded since
            self.meddled_with = False
        return {"success": True}

    def _checker(self, _: Any, sent: dict[str, Any], caller: Process | None) -> Any:
        """On CPU it hashes nothing for linear layers."""
        self.touch_weights("a check", caller)
        return {"checksums": {"model.norm.weight": str(self.weights[0]["model.norm.weight"])}}

    def _rpc(self, _: Any, sent: dict[str, Any], caller: Process | None) -> Any:
        method = sent["method"]
        if method == "skyctl_weight_digest":
            if "weights" in self.asleep:
                raise Refused("Worker failed with error 'the weights of this worker sleep'")
            if self._dice.random() < self._frailty.digest_fails:
                raise Refused("Worker failed with error 'CUDA error: out of memory'")
            asked = sent.get("kwargs", {})
            return {"results": [self._answer(rank, asked) for rank in range(self.ranks)]}
        raise Refused(f"Worker failed with error 'Method {method!r} is not implemented.'")

    def _answer(self, rank: int, asked: Mapping[str, Any]) -> dict[str, Any]:
        contents = {
            name: ("float32", self._checkpoints.bytes_of.get(value, b"?" * 64))
            for name, value in self.weights[rank].items()
        }
        answer = {
            "digest": self._digest(rank),
            "arrangement": "",
            "rows": rows.answers(contents, asked.get("rows", ())),
        }
        if self.workers is not None and "numbered" in asked:
            answer["numbers"] = self.workers.numbers(rank, asked["numbered"][rank])
            answer["place"] = rank
        return answer

    def _digest(self, rank: int) -> str:
        state = [sorted(self.weights[rank].items()), self.open or self.half_open]
        return hashlib.blake2b(repr(state).encode(), digest_size=16).hexdigest()

    _ROUTES: Mapping[str, Callable[..., Any]] = {
        "/get_world_size": _world_size,
        "/is_paused": _is_paused,
        "/is_sleeping": _is_sleeping,
        "/weight_info": _weight_info,
        "/pause": _pause,
        "/resume": _resume,
        "/sleep": _sleep,
        "/wake_up": _wake,
        "/reset_prefix_cache": _reset_prefix_cache,
        "/init_weight_transfer_engine": _init,
        "/start_weight_update": _start,
        "/update_weights": _update,
        "/finish_weight_update": _finish,
        "/update_weight_version": _update_label,
        "/weight_checker": _checker,
        "/collective_rpc": _rpc,
    }
