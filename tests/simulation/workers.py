"""skyctl's worker extension in a simulated server on a GPU: its methods, by name.

    layout    what a trainer's ranks have in memory: mapped, staged beside serving, loaded
    weights   what another server has: its workers fill buffers, which these copy
    tensors   written into a file

Who has mapped memory reads what it holds at that moment, and goes on for some seconds after the
process that owns it has ended (`engines/inside/ended.py`).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from skyctl.engines.inside.ended import GRACE_S
from skyctl.wire.layouts import LayoutReport, ParameterLayout, Part, Program, layout_digest
from skyctl.wire.messages import TensorPart, WeightsOffer
from skyctl.wire.worker import WorkerMethod
from tests.simulation.disk import SHAPE, TENSORS
from tests.simulation.engine import GARBAGE, Engine, Refused, Weights
from tests.simulation.kernel import Process
from tests.simulation.network import _NOBODY, body

if TYPE_CHECKING:
    from tests.simulation.world import World

ITEM = 4
WORD = 2**63
_TENSORS_IN_CHUNK = 2
_TOUCHING = (
    WorkerMethod.LAYOUT_LOAD,
    WorkerMethod.WEIGHTS_COPY,
    WorkerMethod.WEIGHTS_FILL,
    WorkerMethod.WRITE_TENSORS,
)
"""Methods that read or write parameters."""

PARAMETERS = tuple(
    ParameterLayout(name, "float32", tuple(SHAPE), (Part(name, tuple(SHAPE), 1, n, 0, n, 0, n),))
    for name, n in ((name, SHAPE[0]) for name in TENSORS)
)
LAYOUT = layout_digest(PARAMETERS)


def number_of(data: bytes, first: int = 0) -> int:
    """What these elements contribute to the number of their parameter, of which `first` is the
    first: the sum over all parts is that of the whole, whoever has them."""
    words = struct.unpack(f"<{len(data) // ITEM}I", data)
    return sum((place + 1) * word for place, word in enumerate(words, first)) % WORD


class Exports:
    """What trainers export, by process and number: `read` gives what is there now."""

    def __init__(self) -> None:
        self.of: dict[int, Callable[[int], bytes]] = {}

    def read(self, export: Sequence[int]) -> bytes:
        pid, number = export
        return self.of[pid](number)


@dataclass
class _Mapped:
    """A trainer's memory, as the workers of one server have mapped it."""

    key: str
    programs: list[Program]
    exports: list[list[list[int]]]
    stages: bool
    arrives_at: float = 0.0
    beside: list[Weights] | None = None
    """What was staged, by rank; None before it has arrived."""


@dataclass
class _Copying:
    """One side of a copy from server to server."""

    key: str
    buffers: dict[tuple[int, int], Weights] = field(default_factory=dict)
    """By rank and buffer: what the giving side has filled last."""


class Workers:
    """All workers of one server."""

    def __init__(self, engine: Engine, world: World) -> None:
        self._engine, self._world = engine, world
        self.reset()

    def reset(self) -> None:
        """A new process."""
        self._mapped: _Mapped | None = None
        self._copying: _Copying | None = None

    def call(
        self, sent: Mapping[str, Any], caller: Process | None, reply: Callable[[int, bytes], None]
    ) -> bool:
        """Answer a call of one of these methods, or of none of them (False). Raises as theirs."""
        method, arguments = sent.get("method"), sent.get("kwargs") or {}
        if method in _TOUCHING:
            self._engine.touch_weights(str(method), caller)
        if method == WorkerMethod.LAYOUT_LOAD:
            self._write(caller, reply, self._loaded())
        elif method == WorkerMethod.WEIGHTS_COPY:
            self._write(caller, reply, self._copied(**arguments))
        elif method in self._METHODS:
            reply(200, body({"results": self._METHODS[method](self, **arguments)}))
        else:
            return False
        return True

    def _refuse(self, text: str) -> NoReturn:
        raise Refused(f"Worker failed with error '{text}'")

    def _none(self) -> list[None]:
        return [None] * self._engine.ranks

    def _later(self, least_s: float, most_s: float) -> float:
        return self._world.loop.now + self._world.dice.uniform(least_s, most_s)

    def _let_go_when_ended(self, pids: Sequence[int], held: _Mapped | _Copying) -> None:
        """Let go of this some seconds after the first of these processes has ended."""

        def let_go() -> None:
            if self._mapped is held:
                self._mapped = None
            if self._copying is held:
                self._copying = None

        def ended() -> None:
            self._world.loop.call_later(GRACE_S, let_go, context=_NOBODY)

        for pid in pids:
            process = self._world.kernel.processes.get(pid)
            if process is None or process.dead:
                ended()
            else:
                process.on_death.append(ended)

    def _write(
        self,
        caller: Process | None,
        reply: Callable[[int, bytes], None],
        new: Callable[[], list[Weights]],
    ) -> None:
        """Copy into the parameters, for a while. `new`: by rank, what they hold then. It may be of
        several versions: ranks that are told of another's death go on, and a sibling that is copied
        from may get the next one."""
        engine, dice = self._engine, self._world.dice
        process = engine.process
        self._world._before(engine, "/start_weight_update", caller)
        fails = dice.random() < self._world.frailty.update_fails
        engine.reloading = True
        self._world._watch(engine, f"copies of {caller} begin")

        def end() -> None:
            if process is None or process.dead:
                return
            engine.reloading = False
            try:
                ranks = new()
                for rank, weights in zip(engine.weights, ranks, strict=True):
                    rank.update(weights)
                broken = next(iter(ranks[-1]))
                if fails:
                    engine.weights[-1][broken] = GARBAGE
                    self._refuse("CUDA error: an illegal memory access was encountered")
                engine.damaged = False
                if dice.random() < self._world.frailty.corrupts:
                    engine._corrupt(broken)
                engine.loaded_at = self._world.loop.now
            except Refused as error:
                engine.damaged = True
                reply(500, body({"error": {"message": str(error), "code": 500}}))
            else:
                reply(200, body({"results": [[] for _ in ranks]}))
            self._world._watch(engine, f"copies of {caller} end")

        engine.busy_until = max(engine.busy_until, self._later(0.02, 0.3))
        self._world.loop.call_at(engine.busy_until, end, context=_NOBODY)

    # --- out of a trainer's memory --------------------------------------------------------------

    def _layout(self, described: Sequence[str] = (), key: str = "") -> list[Any]:
        if self._mapped is not None and not (key and key == self._mapped.key):
            self._mapped = None
        reason = "an earlier update broke off half-way" if self._engine.half_open else ""
        mapped = self._mapped
        return [
            LayoutReport(
                rank,
                "" if reason else LAYOUT,
                () if reason or LAYOUT in described else PARAMETERS,
                (LAYOUT,),
                reason=reason,
                opened=mapped.key if mapped else "",
                stages=bool(mapped and mapped.stages),
            ).to_wire()
            for rank in range(self._engine.ranks)
        ]

    def _map(
        self,
        programs: Sequence[Mapping[str, Any]],
        exports: Sequence[list[list[int]]],
        key: str,
        pids: Sequence[int],
        staged: bool | None,
    ) -> list[bool]:
        dice, self._mapped = self._world.dice, None
        if self._engine.half_open:
            self._refuse("the model's parameters are not what the program was planned for")
        if not all(self._world.kernel.alive(pid) for pid in pids):
            self._refuse("invalid device context")
        if dice.random() < self._world.frailty.update_fails:
            self._refuse("CUDA out of memory")
        stages = dice.random() < 0.5 if staged is None else staged
        read = [Program.from_wire(program) for program in programs]
        mapped = self._mapped = _Mapped(key, read, [*exports], stages)
        self._let_go_when_ended(pids, mapped)
        return [stages] * self._engine.ranks

    def _stage(self) -> list[None]:
        """Copy beside the parameters, at some moment from now on; it serves meanwhile."""
        mapped, loop = self._require_mapped(), self._world.loop
        mapped.beside, mapped.arrives_at = None, self._later(0.01, 0.3)

        def arrive() -> None:
            if self._mapped is mapped and mapped.arrives_at <= loop.now:
                mapped.beside = self._read(mapped)

        loop.call_at(mapped.arrives_at, arrive, context=_NOBODY)
        return self._none()

    def _arrived(self, key: str) -> list[bool]:
        mapped = self._mapped
        if mapped is None or mapped.key != key:
            self._refuse("it has let go of the trainer, of which a process has ended")
        filled = not mapped.stages or mapped.beside is not None
        return [filled] * self._engine.ranks

    def _loaded(self) -> Callable[[], list[Weights]]:
        mapped = self._require_mapped()

        def new() -> list[Weights]:
            if not mapped.stages:
                return self._read(mapped)
            if mapped.beside is None:
                self._refuse("nothing was staged")
            return mapped.beside

        return new

    def _read(self, mapped: _Mapped) -> list[Weights]:
        """What each rank's program makes of the memory as it is now."""
        return [
            self._filled(program, exports)
            for program, exports in zip(mapped.programs, mapped.exports, strict=True)
        ]

    def _filled(self, program: Program, exports: Sequence[Sequence[int]]) -> Weights:
        parameters = [bytearray(SHAPE[0] * ITEM) for _ in program.parameters]
        for copy in program.copies:
            data = self._world.exports.read(exports[copy.chunk])
            part = data[copy.source : copy.source + copy.row]
            assert copy.rows == 1 and len(part) == copy.row
            parameters[copy.parameter][copy.target : copy.target + copy.row] = part
        weights = {}
        for (name, _, _), parameter in zip(program.parameters, parameters, strict=True):
            value = zlib.crc32(parameter)
            self._world.checkpoints.bytes_of.setdefault(value, bytes(parameter))
            weights[name] = value
        return weights

    def _require_mapped(self) -> _Mapped:
        if self._mapped is None:
            self._refuse("no program: call skyctl_layout_open first")
        return self._mapped

    def _close_layout(self) -> list[None]:
        self._mapped = None
        return self._none()

    def numbers(self, rank: int, names: Sequence[str]) -> dict[str, int]:
        """Those of a rank's parameters. A damaged value has another one than what it came from."""
        weights, bytes_of = self._engine.weights[rank], self._world.checkpoints.bytes_of
        found = {}
        for name in names:
            data = bytes_of.get(weights[name], b"")
            whole = zlib.crc32(data) == weights[name]
            found[name] = (number_of(data) + (0 if whole else weights[name] + 1)) % WORD
        return found

    # --- out of another server ------------------------------------------------------------------

    def _share(self, key: str, directory: str, pid: int) -> list[dict[str, Any]]:
        engine, count = self._engine, len(TENSORS)
        self._copying = None
        if engine.half_open:
            refused = WeightsOffer(reason="an earlier update broke off half-way")
            return [asdict(refused) for _ in range(engine.ranks)]
        self._begin(key, pid)
        return [
            asdict(WeightsOffer(f"rank {rank}", count, _TENSORS_IN_CHUNK, [[engine.url, rank]]))
            for rank in range(engine.ranks)
        ]

    def _begin(self, key: str, pid: int) -> _Copying:
        copying = self._copying = _Copying(key)
        self._let_go_when_ended([pid], copying)
        return copying

    def _fill(self, key: str, chunk: int) -> list[None]:
        copying = self._require_copying(key)
        for rank, weights in enumerate(self._engine.weights):
            copying.buffers[rank, chunk % 2] = {name: weights[name] for name in _in_chunk(chunk)}
        return self._none()

    def _open(self, key: str, offers: Sequence[Mapping[str, Any]], pid: int) -> list[None]:
        if self._engine.half_open or self._world.dice.random() < self._world.frailty.update_fails:
            self._refuse("CUDA out of memory")
        [url, _] = offers[0]["sources"][0]
        giver = self._world.engine_at(url)
        theirs = giver and giver.workers and giver.workers._copying
        if not theirs or theirs.key != key:
            self._refuse("invalid device context")
        self._begin(key, pid).buffers = theirs.buffers
        return self._none()

    def _copied(self, key: str, chunk: int, last: bool) -> Callable[[], list[Weights]]:
        copying = self._require_copying(key)

        def new() -> list[Weights]:
            return [copying.buffers[rank, chunk % 2] for rank in range(self._engine.ranks)]

        return new

    def _require_copying(self, key: str) -> _Copying:
        if self._copying is None or self._copying.key != key:
            self._refuse("this copy was given up")
        return self._copying

    def _close_weights(self, free: bool) -> list[None]:
        self._copying = None
        return self._none()

    # --- into a file -----------------------------------------------------------------------------

    def _parts(self, tensors: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
        [columns] = SHAPE
        part = [
            asdict(TensorPart(tensor["name"], "float32", [[0, 0, 1, columns]]))
            for tensor in tensors
        ]
        return [part] * self._engine.ranks

    def _write_tensors(
        self, path: str, inode: int, tensors: Sequence[Mapping[str, Any]]
    ) -> list[None]:
        if not Path(path).exists() or Path(path).stat().st_ino != inode:
            self._refuse("the file is another one")
        if self._world.disk.full:
            self._refuse("No space left on device")
        weights, bytes_of = self._engine.weights[0], self._world.checkpoints.bytes_of
        with Path(path).open("r+b") as file:
            for tensor in tensors:
                file.seek(tensor["offset"])
                file.write(bytes_of.get(weights[tensor["name"]], b"?" * SHAPE[0] * ITEM))
        self._world.checkpoints.touched(Path(path))
        return self._none()

    _METHODS: Mapping[str, Callable[..., list[Any]]] = {
        WorkerMethod.LAYOUT: _layout,
        WorkerMethod.LAYOUT_MAP: _map,
        WorkerMethod.LAYOUT_STAGE: _stage,
        WorkerMethod.LAYOUT_ARRIVED: _arrived,
        WorkerMethod.LAYOUT_CLOSE: _close_layout,
        WorkerMethod.WEIGHTS_SHARE: _share,
        WorkerMethod.WEIGHTS_FILL: _fill,
        WorkerMethod.WEIGHTS_OPEN: _open,
        WorkerMethod.WEIGHTS_CLOSE: _close_weights,
        WorkerMethod.TENSOR_PARTS: _parts,
        WorkerMethod.WRITE_TENSORS: _write_tensors,
    }


def _in_chunk(chunk: int) -> Sequence[str]:
    return TENSORS[chunk * _TENSORS_IN_CHUNK : (chunk + 1) * _TENSORS_IN_CHUNK]
