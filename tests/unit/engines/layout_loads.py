"""Models of vLLM's as a push of layouts finds and loads them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.transfer.plan import ChunkPlan
from skyctl.wire.layouts import LayoutReport, Program, layout_digest

KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tie_word_embeddings": True},
    "experts": {"experts": 4},
}


def report_of(model: Any, rank: int = 0) -> LayoutReport:
    """As `LayoutLoader.report` makes it; experts as a GPU's backend has them."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    from skyctl.engines.vllm.inside.layout import describe, ignored_tensors, whole_problem

    for module in model.modules():
        if hasattr(getattr(module, "quant_method", None), "unquantized_backend"):
            module.quant_method.unquantized_backend = UnquantizedMoeBackend.TRITON
    parameters = tuple(describe(model))
    return LayoutReport(
        rank,
        layout_digest(parameters),
        parameters,
        ignored=tuple(ignored_tensors(model)),
        reason=whole_problem(model),
    )


class Loader:
    """A worker's loader whose sender's slots are ordinary memory."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch

        from skyctl.engines.vllm.inside import layout_load, peers

        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(layout_load.LayoutLoader, "_map", lambda loader, payload: self.slots)
        self.slots = torch.zeros(0, dtype=torch.uint8)
        monkeypatch.setattr(peers.PeerLoader, "_packs", False)
        self.loader = peers.PeerLoader(
            SimpleNamespace(
                model_runner=SimpleNamespace(get_model=lambda: model),
                device=torch.device("cpu"),
                vllm_config=SimpleNamespace(
                    parallel_config=SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
                ),
            )
        )

    def copy(self, program: Program, plan: ChunkPlan, chunks: list[Any], slots: int) -> None:
        """All chunks through so many slots, each filled again when it has been copied."""
        import torch

        size = plan.slot_bytes
        self.slots = torch.zeros(slots * size, dtype=torch.uint8)
        self.loader.open(program, "handle", [slot * size for slot in range(slots)], 0)
        for begin in range(0, len(chunks), slots):
            ready = range(begin, min(begin + slots, len(chunks)))
            for chunk in ready:
                at = chunk % slots * size
                self.slots[at : at + len(chunks[chunk])] = chunks[chunk]
            self.loader.load(list(ready), last=ready.stop == len(chunks))

    def process(self, program: Program, plan: ChunkPlan, chunks: list[Any], *, keep: bool) -> None:
        """Every chunk in a slot of its own."""
        import torch

        size = plan.slot_bytes
        self.slots = torch.zeros(len(chunks) * size, dtype=torch.uint8)
        self.loader.open(program, "handle", [size * number for number in range(len(chunks))], 0)
        for number, octets in enumerate(chunks):
            self.slots[number * size : number * size + len(octets)] = octets
            self.loader.process(number, keep)


def come_to(worker: Loader, model: Any, names: list[str]) -> dict[str, int]:
    from skyctl.wire.device_digest import as_it_lies, digest_on_device

    looked_at, parameters = worker.loader.running_names(names), dict(model.named_parameters())
    numbers = digest_on_device([as_it_lies(parameters[name]) for name in looked_at])
    return worker.loader.numbers_of(names, dict(zip(looked_at, numbers, strict=True)))
