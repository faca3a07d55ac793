"""A stub's place in a sender's gloo group, or in a trainer's, taken by what vLLM's workers have."""

from __future__ import annotations

import asyncio
import os
import signal
import zlib
from typing import TYPE_CHECKING, Any

from skyctl.wire.layouts import LayoutReport, Program
from skyctl.wire.messages import NOT_ON_GPU, ChunkUpdate, ReceiverInit, RowQuestion
from tests.stub.rows import KEPT_BYTES, Contents
from tests.stub.state import EngineRefused, StubEngine

if TYPE_CHECKING:
    from skyctl.engines.vllm.inside.arrivals import Arrivals
    from skyctl.engines.vllm.inside.receivers import Receiver


class StubGroup:
    """What an engine is told of a push, and what arrives there with `joins`; else it answers, and
    is not in the group."""

    def __init__(self, engine: StubEngine) -> None:
        self.joins = False
        self._engine = engine
        self._receiver: Receiver | None = None

    async def init(self, info: dict[str, Any]) -> None:
        self.leave()
        self._engine.init_transfer(info)
        if self.joins and info["transport"] == "gloo":
            self._receiver = await asyncio.to_thread(_open, ReceiverInit(**info))

    async def update(self, info: dict[str, Any]) -> None:
        received: Contents = {}
        if self._receiver is not None:
            try:
                received = await asyncio.to_thread(_receive, self._receiver, ChunkUpdate(**info))
            except RuntimeError as error:
                self._engine.fail_update()
                raise EngineRefused(f"Worker failed with error '{error}'") from error
        self._engine.update(info)
        self._engine.contents |= received

    def leave(self) -> None:
        """As a worker that dies."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


class StubPeers:
    """A stub's place in the group in which a trainer's ranks send, taken by what vLLM's workers
    have."""

    def __init__(self, engine: StubEngine) -> None:
        self.dies_at = ""
        """The step at which this process is killed: map, stage, arrived or load."""
        self._engine = engine
        self.key = ""
        """What a trainer's group is known by; "" without one."""
        self.taken = 0
        """How often it has taken a place."""
        self._arrivals: Arrivals | None = None
        self._program: Program | None = None
        self._tensors: dict[str, Any] = {}

    async def call(self, method: str, kwargs: dict[str, Any]) -> Any:
        """What the only worker answers to one of skyctl's methods."""
        step = method.removeprefix("skyctl_layout").lstrip("_") or "report"
        act = getattr(self, step)
        if step == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return await asyncio.to_thread(act, **kwargs)
        except RuntimeError as error:
            raise EngineRefused(f"Worker failed with error '{error}'") from error

    def report(self, key: str = "", **_: Any) -> dict[str, Any]:
        if key != self.key:
            self.close()
        return LayoutReport(0, reason=NOT_ON_GPU, opened=self.key).to_wire()

    def map(self, key: str, group: dict[str, Any], place: int, **given: Any) -> bool:
        import torch

        from skyctl.engines.vllm.inside.arrivals import Arrivals, steps_of  # torch
        from skyctl.wire.peer_group import Meeting

        self.close()
        self._program = program = Program.from_wire(given["programs"][0])
        meeting, cpu = Meeting.from_wire(group), torch.device("cpu")
        steps = steps_of(program.copies, given["exports"][0])
        self.key = key
        self.taken += 1
        self._arrivals = Arrivals(meeting, place, cpu, steps, lambda: self.release(key))
        return True

    def release(self, key: str) -> None:
        if self.key == key:
            self.close()

    def stage(self, numbers: list[dict[str, int]]) -> None:
        from skyctl.engines.vllm.inside import arrivals
        from skyctl.wire.copies import octets_of

        assert self._program is not None and self._arrivals is not None
        self._tensors = tensors = arrivals.empty_tensors(self._program)
        targets = {n: octets_of(tensor) for n, tensor in enumerate(tensors.values())}
        check = lambda: arrivals.require_numbers(tensors, numbers[0])  # noqa: E731
        self._arrivals.receive(targets, check)

    def arrived(self, key: str) -> bool:
        if self._arrivals is None or self.key != key:
            raise RuntimeError("it has let go of the trainer, of which a process has ended")
        return self._arrivals.have_come()

    def load(self, rows: list[dict[str, Any]], **_: Any) -> list[dict[str, str]]:
        from skyctl.engines.vllm.inside.arrivals import rows_of

        assert self._arrivals is not None
        self._arrivals.wait()
        tensors, self._tensors = self._tensors, {}
        assert tensors, "nothing was staged"
        questions = [RowQuestion(**row) for row in rows]
        answer = [rows_of(tensors[question.name], question) for question in questions]
        contents = {
            name: (str(tensor.dtype).removeprefix("torch."), _bytes(tensor))
            for name, tensor in tensors.items()
        }
        self._engine.load(contents)
        return answer

    def close(self) -> None:
        arrivals, self._arrivals, self.key = self._arrivals, None, ""
        if arrivals is not None:
            arrivals.close()


def _bytes(tensor: Any) -> bytes:
    return bytes(tensor.reshape(-1).view(dtype=_byte()).numpy())


def _open(init: ReceiverInit) -> Receiver:
    from skyctl.engines.vllm.inside.receivers import open_receiver  # torch

    try:
        return open_receiver(init, 0)
    except (OSError, RuntimeError) as error:
        raise EngineRefused(f"Worker failed with error '{error}'") from error


def _receive(receiver: Receiver, update: ChunkUpdate) -> Contents:
    found: Contents = {}
    for (name, tensor), dtype, expected in zip(
        receiver.receive(update), update.dtype_names, update.crc32, strict=True
    ):
        data = _bytes(tensor)
        if zlib.crc32(data) != expected:
            raise RuntimeError(f"{name} was damaged on its way")
        if len(data) <= KEPT_BYTES:
            found[name] = (dtype, data)
    return found


def _byte() -> Any:
    import torch

    return torch.uint8
