"""Weights that a trainer's ranks send this worker point to point, instead of memory that it maps.

Per push:  map ─► stage ─► load     what arrives lies beside the parameters when the freeze begins
           map ───────────► load    without room for that, in any worker: it arrives in the
                                    parameters, frozen

The group forms, and weights arrive, in a thread: the model serves meanwhile, and a rank that dies
stops nothing. On CPU vLLM packs weights, so they arrive as the trainer's tensors, are compared with
its sums, and its loader takes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from skyctl.engines.inside.ended import when_ended
from skyctl.engines.vllm.inside.arrivals import (
    Arrivals,
    Targets,
    empty_tensors,
    landing_bytes,
    require_numbers,
    rows_of,
    steps_of,
)
from skyctl.engines.vllm.inside.layout_load import LayoutLoader
from skyctl.engines.vllm.inside.layout_memory import SPARE_BYTES, Beside, require_free
from skyctl.wire.copies import octets_of
from skyctl.wire.layouts import Program
from skyctl.wire.messages import RowQuestion
from skyctl.wire.peer_group import Meeting


class PeerLoader(LayoutLoader):
    """A worker's end of pushes that also takes what a trainer's ranks send."""

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self._arrivals: Arrivals | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._arriving: Targets = {}
        self._arrives_beside = False
        self._keys: dict[frozenset[int], str] = {}

    @property
    def _packs(self) -> bool:
        """Whether vLLM computes with packed copies of the parameters."""
        return bool(self._device.type == "cpu")

    def join(
        self,
        program: Program,
        sources: Sequence[Sequence[int]],
        key: str,
        staged: bool | None,
        group: Mapping[str, Any],
        place: int,
    ) -> bool:
        """As `map`, of a trainer whose ranks send: the group begins to form. Returns whether a push
        must call `stage`.
        """
        self.close()
        by_loader, steps = self._packs, steps_of(program.copies, sources)
        landing = landing_bytes(steps)
        try:
            if by_loader:
                self._require_engine()
                self._program = program
            else:
                self._begin(program, slots=len(sources))
                self._arriving = targets = self._targets(program)
                size = sum(octets.numel() for octets in targets.values())
                if staged is None:
                    staged = (
                        torch.cuda.mem_get_info(self._device)[0] >= size + landing + SPARE_BYTES
                    )
                if staged:
                    self._beside = Beside(targets, self._device)
                require_free(landing, self._device)
                torch.cuda.synchronize(self._device)
            meeting = Meeting.from_wire(group)
            self._arrivals = Arrivals(
                meeting, place, self._device, steps, lambda: self.release(key)
            )
            self.key = key
            return by_loader or self._beside is not None
        except BaseException:
            self.close()
            raise

    def stage_numbered(self, numbers: Mapping[str, int] | None) -> None:
        """As `stage`; with `numbers`, what arrives for the loader must have these."""
        if self._arrivals is None:
            self.stage()
        elif self._beside is not None:
            self._require_proven()
            self._arrivals.receive(self._beside.parameters)
            self._arrives_beside = True
        elif self._packs:
            self._stage_tensors(self._arrivals, numbers or {})
        else:
            raise RuntimeError("what is sent arrives in the parameters, and nothing is staged")

    def has_arrived(self, key: str) -> bool:
        """Whether what was begun for the trainer of this key has ended. Raises RuntimeError: it has
        failed, or was let go.
        """
        if self.key != key:
            raise RuntimeError("it has let go of the trainer, of which a process has ended")
        if self._arrivals is not None:
            return self._arrivals.have_come()
        return self._beside is None or self._beside.is_filled

    def load(self, chunks: Sequence[int] | None, last: bool) -> None:
        arrivals = self._arrivals
        if arrivals is None:
            super().load(chunks, last)
            return
        if self._tensors:
            arrivals.wait()
            tensors, self._tensors = self._tensors, {}
            self._require_engine().load_whole(tensors)
            return
        self._require_proven()
        if not self._in_place():
            raise RuntimeError("the model's parameters are not where they were")
        beside = self._beside if self._arrives_beside else None
        self._arrives_beside = False
        if beside is None:  # perhaps another worker had no room
            torch.cuda.synchronize(self._device)
            arrivals.receive(self._arriving)
        arrivals.wait()
        if beside is not None:
            beside.move()
        torch.cuda.synchronize(self._device)
        self._finish()

    def received(self, questions: Sequence[RowQuestion]) -> list[dict[str, str]]:
        """The asked rows of what is about to be loaded, in hexadecimal digits."""
        return [rows_of(self._tensors[question.name], question) for question in questions]

    def release_when_ended(self, pids: Sequence[int], key: str) -> None:
        """Release what has this key once one of the trainer's processes has ended, or what they
        have had mapped since: trainers whose tensors move are mapped at each push.
        """
        trainer = frozenset(pids)
        watched = trainer in self._keys
        self._keys[trainer] = key
        if not watched:
            when_ended(pids, lambda: self.release(self._keys.pop(trainer)))

    def release(self, key: str) -> None:
        """Let go of a trainer that has ended, from another thread: of its memory, or of the group
        with it and what lies beside the parameters.
        """
        arrivals = self._arrivals
        if arrivals is not None and self.key == key:
            arrivals.close()  # a load that waits for its ranks, and has the lock, fails
        with self.lock:
            if self.key == key:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                self.close()

    def close(self) -> None:
        arrivals, self._arrivals = self._arrivals, None
        self._tensors, self._arriving, self._arrives_beside = {}, {}, False
        if arrivals is not None:
            arrivals.close()
        super().close()

    def _stage_tensors(self, arrivals: Arrivals, numbers: Mapping[str, int]) -> None:
        self._tensors = tensors = empty_tensors(self._opened())
        targets = {n: octets_of(tensor) for n, tensor in enumerate(tensors.values())}
        arrivals.receive(targets, lambda: require_numbers(tensors, numbers))

    def _require_engine(self) -> Any:
        engine = getattr(self._worker, "weight_transfer_engine", None)
        if not hasattr(engine, "load_whole"):
            raise RuntimeError("it was started without skyctl's weight-transfer engine")
        return engine
