"""The parent's side of the sender process: start it, await its events, kill it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.checkpoints.finite import may_be_not_finite
from skyctl.children import child_environment, started
from skyctl.errors import SkyctlError
from skyctl.launch.base import A_GPU, Node
from skyctl.store.owned import own_stdin
from skyctl.transfer.plan import ChunkPlan, Placed
from skyctl.transfer.reader import Filled
from skyctl.wire.layouts import Program

_LINE_LIMIT = 256 * 1024 * 1024  # a header of a very large model is a few megabytes of JSON
_STDERR_KEPT = 64 * 1024
_CLOSE_TIMEOUT_S = 2.0
_COMMAND_TIMEOUT_S = 120.0  # an interpreter on a cold disk takes tens of seconds to read the first
_FINAL = ("CheckpointChanged", "NotFinite")
_RUN = ("-P", "-m", "skyctl.transfer.sender")  # -P: nothing is imported from the current directory
_ENVIRONMENT_THERE = ("PYTHONUNBUFFERED=1", "CUDA_DEVICE_ORDER=PCI_BUS_ID")
_EVENT = b'{"event"'
_NCCL_NAME = re.compile("NCCL_[A-Z0-9_]+")
_NCCL_OWN = ("NCCL_DEBUG", "NCCL_NO_CACHE", "NCCL_LAUNCH_MODE", "NCCL_HOSTID")
"""Prefixes of variables that may differ between processes."""
_NCCL_FILES = ("PLUGIN", "FILE", "DUMP", "PATH")
"""Parts of the names of variables that make NCCL load or write a file: a server that another user
started must not choose files for our sender.
"""


class SenderFailed(SkyctlError):
    """The sender ended, or did not answer in time. `final`: the checkpoint is at fault (it changed
    on disk or holds NaN), so another sender would fail as well.
    """

    final = False


@dataclass(frozen=True)
class Opened:
    """`endpoint` is what servers connect to. `staged_whole`: every chunk has its own slot.

    `shown` is what servers need to map the slots (`DeviceCarrier.export`), None if they cannot.
    """

    endpoint: Mapping[str, Any]
    staged_whole: bool
    shown: Mapping[str, Any] | None = None


def shared_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """NCCL's variables of an environment that all ranks of a group must share; no files.

    Ranks never reconcile them: a group whose members differ in the protocol or the number of
    channels hangs in its first broadcast. Servers get them from the fleet file's `env:`, and from
    vLLM, which sets a dozen if VLLM_BATCH_INVARIANT is on; the sender adopts the servers'.
    """
    return {
        name: value
        for name, value in environment.items()
        if _NCCL_NAME.fullmatch(name)
        and value.isprintable()
        and not name.startswith(_NCCL_OWN)
        and not any(part in name for part in _NCCL_FILES)
        and "/" not in value
    }


def applied_settings(environment: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """An environment with these settings in place of its own."""
    own = shared_settings(environment)  # variables that name files stay as they are
    return {name: value for name, value in environment.items() if name not in own} | dict(settings)


def _environment(nccl_settings: Mapping[str, str] | None) -> dict[str, str]:
    environment = child_environment({"PYTHONUNBUFFERED": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    # it is given GPUs by nvidia-smi's numbers, which this variable would renumber
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    return environment if nccl_settings is None else applied_settings(environment, nccl_settings)


def _piece(placed: Placed, *, scan: bool) -> tuple[int, int, int, int, str]:
    """The arguments of the sender's `transfer.reader.Piece`."""
    tensor = placed.tensor
    dtype = tensor.dtype if scan and may_be_not_finite(tensor.dtype) else ""
    return tensor.shard, tensor.begin, tensor.nbytes, placed.offset, dtype


class SenderProcess:
    """One sender. Every wait has a deadline; after a failure every wait raises that failure."""

    def __init__(self, process: asyncio.subprocess.Process, node: Node | None = None) -> None:
        self._process = process
        self._node = node
        self._name = f"the sender on {node.target}" if node else "the sender"
        self._events: dict[tuple[str, int], dict[str, Any]] = {}
        self._failure: SenderFailed | None = None
        self._changed = asyncio.Condition()
        self._read_last: tuple[ChunkPlan, bool] | None = None
        self._stderr = b""
        self._pumps = [
            asyncio.create_task(self._pump_events()),
            asyncio.create_task(self._pump_stderr()),
        ]

    @classmethod
    async def spawn(
        cls,
        python: str,
        nccl_settings: Mapping[str, str] | None = None,
        *,
        node: Node | None = None,
    ) -> SenderProcess:
        """Start a sender that waits for `open`; with these NCCL variables, unless None. With `node`
        it runs there, on that machine's interpreter, and the local process is the connection.
        """
        argv = [python or sys.executable, *_RUN]
        environment = _environment(nccl_settings)
        if node is not None:
            from skyctl.launch.remote.session import command_on, connection_environment

            settings = [f"{name}={value}" for name, value in (nccl_settings or {}).items()]
            # Ray shows it the GPU that it has given; others are numbered as nvidia-smi does
            env = ["env", *([] if node.target == A_GPU else ["-u", "CUDA_VISIBLE_DEVICES"])]
            argv = command_on(node, [*env, *_ENVIRONMENT_THERE, *settings, node.python, *_RUN])
            environment = connection_environment()
        process = await started(
            asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LINE_LIMIT,
                env=environment,
                start_new_session=True,  # Ctrl-C goes to the parent, which decides what it means
            ),
            session=True,
        )
        own_stdin(process)
        return cls(process, node)

    async def warm(self, *, transport: str, session: str, carrier: Mapping[str, Any]) -> None:
        """Have it import and allocate what every push by this carrier needs. A push may be opened
        before it is `warmed`, and waits its turn.
        """
        await self._command(op="warm", transport=transport, session=session, carrier=dict(carrier))

    async def warmed(self, *, timeout_s: float) -> None:
        """Wait until `warm` is done."""
        await self._event("warmed", 0, timeout_s)

    async def open(
        self,
        *,
        transport: str,
        session: str,
        checkpoint: Checkpoint,
        plan: ChunkPlan,
        slots: int,
        carrier: Mapping[str, Any] | None,
        ring_only: bool = False,
        reserve_bytes: int = 0,
        scan: bool = True,
        programs: Sequence[Program] = (),
        shown: bool = False,
        exports: bool = True,
        bytes_per_s: int | None = None,
        relay_rank: int | None = None,
    ) -> None:
        """Tell it what to read; it starts filling its slots at once. `ring_only`: it takes only
        this many slots, even if it could take more; `reserve_bytes`: what it leaves free for
        servers. `scan`: it refuses NaN and infinity. `programs`: each filled chunk comes with the
        numbers of the parameters it completes. `shown`: servers copy out of the slots by
        themselves; without `exports` no server reads them. It reads at most `bytes_per_s` until
        `lift_pace`; None: as fast as it can. With a `relay_rank` it waits for `relay`; rank 0
        passes on what it reads, and others read nothing.

        `carrier` has the options of a new carrier; None keeps the existing one.
        """
        self._events.clear()
        await self._command(
            op="open",
            transport=transport,
            session=session,
            shards=[] if relay_rank else [asdict(shard) for shard in checkpoint.shards],
            elsewhere=self._node is not None,
            chunks=self._new_chunks(plan, scan=scan),
            slots=slots,
            ring_only=ring_only,
            reserve_bytes=reserve_bytes,
            slot_bytes=plan.slot_bytes,
            carrier=None if carrier is None else dict(carrier),
            programs=[program.to_wire() for program in programs],
            shown=shown,
            exports=exports,
            bytes_per_s=bytes_per_s,
            relay_rank=relay_rank,
        )

    def _new_chunks(self, plan: ChunkPlan, *, scan: bool) -> list[list[Any]] | None:
        """What the sender reads; None for the chunks of the last push."""
        before, self._read_last = self._read_last, (plan, scan)
        if before is not None and before[0] is plan and before[1] is scan:
            return None
        return [[_piece(placed, scan=scan) for placed in chunk.placed] for chunk in plan.chunks]

    async def relay(self, rank: int, world_size: int, unique_id: str = "") -> None:
        """Have it form a group with the senders of other machines. Rank 0 says the group's id
        (`relaying`), which the others are given. With a `world_size` of 0 the last one stands.
        """
        await self._command(op="relay", rank=rank, world_size=world_size, id=unique_id)

    async def relaying(self, *, timeout_s: float) -> str:
        """Wait until rank 0 says the id of its group."""
        return str((await self._event("relaying", 0, timeout_s))["id"])

    async def relayed(self, *, timeout_s: float) -> None:
        """Wait until all have joined."""
        await self._event("relayed", 0, timeout_s)

    async def lift_pace(self) -> None:
        """Lift the read limit: servers now wait for the rest."""
        await self._command(op="lift_pace")

    @property
    def healthy(self) -> bool:
        """Whether it has not ended, failed or been killed."""
        return self._failure is None and self._process.returncode is None

    @property
    def failure(self) -> SenderFailed | None:
        """Why it can do nothing more; None while it lives."""
        return self._failure

    @property
    def pid(self) -> int:
        return self._process.pid

    async def opened(self, *, timeout_s: float) -> Opened:
        """Wait until servers can connect to it."""
        event = await self._event("opened", 0, timeout_s)
        return Opened(event["endpoint"], event["staged_whole"], event["slots"])

    async def filled(self, chunk: int, *, timeout_s: float) -> Filled:
        """Wait until a chunk is in its slot."""
        event = await self._event("filled", chunk, timeout_s)
        return Filled(chunk, event["slot"], tuple(event["crc32"]), event.get("extra", {}))

    async def join(self, *, timeout_s: float) -> None:
        """Take part in the rendezvous; returns when the group is complete."""
        await self._command(op="join")
        await self._event("joined", 0, timeout_s)

    async def send(self, filled: Filled, size: int, *, timeout_s: float) -> None:
        """Send a filled chunk to the group."""
        await self._command(op="send", chunk=filled.chunk, slot=filled.slot, size=size)
        await self._event("sent", filled.chunk, timeout_s)

    async def free_slots(self, *, timeout_s: float) -> None:
        """The push is over: free the slots, and wait for the next."""
        await self._command(op="free_slots")
        await self._event("freed", 0, timeout_s)

    async def release(self, chunk: int) -> None:
        """Every server has loaded the chunk: its slot may be refilled."""
        self._events.pop(("filled", chunk), None)
        await self._command(op="release", chunk=chunk)

    def kill(self, reason: str) -> None:
        """End the process at once; waits raise `reason`."""
        if self._failure is None:
            self._failure = SenderFailed(reason)
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Let the process end, kill it if it does not, and reap it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self.kill("the sender was closed")
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._process.wait()
                await asyncio.wait(self._pumps)
        except TimeoutError:  # what ssh left behind may hold its pipes
            self._process._transport.close()  # type: ignore[attr-defined]
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _command(self, **message: Any) -> None:
        if self._failure is not None:
            raise self._failure
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            async with asyncio.timeout(_COMMAND_TIMEOUT_S):
                await self._process.stdin.drain()
        except TimeoutError:
            self.kill(f"{self._name} took no command in {_COMMAND_TIMEOUT_S:g} s")
        except (ConnectionError, RuntimeError):
            pass  # it ended; the event pump finds out why, and the next wait reports it

    async def _event(self, name: str, number: int, timeout_s: float) -> dict[str, Any]:
        key = (name, number)
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: key in self._events or self._failure)
        except TimeoutError:
            self.kill(f"{self._name} did not say {name!r} in {timeout_s:g} s")
        if key in self._events:
            return self._events[key]
        assert self._failure is not None
        raise self._failure

    async def _pump_events(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if not line.startswith(_EVENT):  # output of a login shell
                continue
            message = json.loads(line)
            if message["event"] == "error":
                failure = SenderFailed(
                    f"{self._name} failed: {message['message']}",
                    hint=message["hint"],
                    details={"kind": message["kind"], "traceback": message["traceback"]},
                )
                failure.final = message["kind"] in _FINAL
                await self._fail(failure)
                continue
            async with self._changed:
                self._events[message["event"], message.get("chunk", 0)] = message
                self._changed.notify_all()
        code = await self._process.wait()
        await self._fail(SenderFailed(f"{self._name} ended with code {code}{self._last_words()}"))

    async def _fail(self, failure: SenderFailed) -> None:
        """Make every wait raise this, unless another failure came first."""
        async with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    async def _pump_stderr(self) -> None:
        assert self._process.stderr is not None
        while block := await self._process.stderr.read(65536):
            self._stderr = (self._stderr + block)[-_STDERR_KEPT:]

    def _last_words(self) -> str:
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""
