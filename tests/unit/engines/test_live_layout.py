"""A worker fills its parameters from what a trainer's ranks export, as vLLM's loader would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.live.blocks import Block
from skyctl.live.plan import Piece, WorkerPlan, plan_live
from tests.tiny import make_tiny_checkpoint
from tests.unit.engines.layout_loads import KINDS, Loader, come_to, report_of
from tests.unit.engines.vllm_models import vllm_model

pytestmark = pytest.mark.usefixtures("vllm")
RANKS = 3


class Trainer:
    """Ranks that share a checkpoint by rows, as FSDP 2 does, in ordinary memory."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        import torch
        from safetensors.torch import load_file

        self.pieces: list[list[Piece]] = [[] for _ in range(RANKS)]
        self.exports: list[list[Any]] = [[] for _ in range(RANKS)]
        [shard] = checkpoint.glob("*.safetensors")
        for name, tensor in load_file(shard).items():
            at = 0
            for rank, part in enumerate(tensor.chunk(RANKS)):
                start, size = (at, *[0] * (tensor.dim() - 1)), tuple(part.shape)
                block = Block(name, "bfloat16", tuple(tensor.shape), start, size)
                self.pieces[rank].append(Piece(block, len(self.exports[rank])))
                self.exports[rank].append(part.to(getattr(torch, dtype)).clone().view(-1))
                at += len(part)

    def numbers(self, plan: WorkerPlan) -> dict[str, int]:
        from skyctl.live.sums import Summer, added

        rows = plan.rows_by_rank()
        return added(
            plan.parameters,
            [
                Summer(plan.parameters, rows[rank], exports).sum(exports)
                for rank, exports in enumerate(self.exports)
            ],
        )

    @contextmanager
    def sending(self, plan: WorkerPlan) -> Iterator[Callable[[Any, bool], None]]:
        """A group of the ranks and a worker, over gloo. What it yields is called for each push: the
        worker's loader joins in the first, and stages or does not.
        """
        from skyctl.live.sending import Sender
        from skyctl.wire.group_store import GroupStore
        from skyctl.wire.peer_group import Meeting

        address, secret = "127.0.0.1", b"secret"
        store = GroupStore(address, secret, ranks=RANKS, timeout_s=20)
        place = ("group", "gloo", address, store.port, secret.hex())
        meeting = Meeting(*place, RANKS + 1, 20.0, 20.0).to_wire()
        senders = [Sender() for _ in range(RANKS)]
        for sender, rows in zip(senders, plan.rows_by_rank(), strict=True):
            body = {"layout": plan.layout, "parameters": plan.parameters, "rows": rows}
            body["senders"] = sum(map(bool, plan.rows_by_rank()))
            sender.prepare([body])

        def push(loader: Any, staged: bool, *, has_room: bool | None = None) -> None:
            group = {"meeting": meeting, "workers": [plan.layout]}
            for rank, sender in enumerate(senders):
                sender.send(rank, group, self.exports[rank], None if rank else store)
            if not loader.key:
                sources = [list(source) for source in plan.sources]
                room = staged if has_room is None else has_room
                assert loader.join(plan.program, sources, "key", room, meeting, RANKS) is room
            if staged:
                loader.stage_numbered(None)
            elif not has_room:
                with pytest.raises(RuntimeError, match="nothing is staged"):
                    loader.stage_numbered(None)
            loader.load(None, last=True)
            for sender in senders:
                sender.wait(20.0)

        try:
            yield push
        finally:
            store.close()

    def rows(self, plan: WorkerPlan) -> list[list[Any]]:
        """The exports that a worker maps: in place of handles, where they are."""
        return [[self.exports[rank][export]] for rank, export in plan.sources]


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the loader of a model; a row of an export has the tensor itself."""
    from skyctl.engines.vllm.inside import layout_load

    monkeypatch.setattr(layout_load, "Export", SimpleNamespace(from_wire=lambda row: row))
    monkeypatch.setattr(layout_load, "opened", lambda row, device: row[0])
    return lambda model: Loader(model, monkeypatch)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Two of each kind."""
    root = tmp_path_factory.mktemp("live")
    return {
        kind: [
            make_tiny_checkpoint(root / f"{kind}-{seed}", seed=seed, dtype="bfloat16", **arguments)
            for seed in (3, 4)
        ]
        for kind, arguments in KINDS.items()
    }


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("kind", "ranks"), [("dense", 1), ("dense", 2), ("tied", 1), ("experts", 2)]
)
def test_parameters_become_the_trainers(
    checkpoints: dict[str, list[Path]], worker: Any, kind: str, ranks: int, dtype: str, staged: bool
) -> None:
    import torch

    before, after = checkpoints[kind]
    with vllm_model(after, rank=ranks - 1, ranks=ranks) as model:
        made = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(after, dtype)
    with vllm_model(before, rank=ranks - 1, ranks=ranks) as model:
        report = report_of(model)
        plan = plan_live(trainer.pieces, [report])[report.layout]
        loader = worker(model).loader
        loader.map(plan.program, trainer.rows(plan), "first", staged)
        with pytest.raises(RuntimeError, match="has not been proven"):
            loader.stage()
        with pytest.raises(RuntimeError, match="has not been proven"):
            loader.load(None, last=True)
        loader.mark_proven(report.layout)
        running = {name: p.detach().clone() for name, p in model.named_parameters()}
        loader.stage()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, running[name]), name
        for _ in range(2):  # exports stay mapped from push to push
            loader.stage()
            loader.load(None, last=True)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, made[name]), name
        numbers = trainer.numbers(plan)
        assert come_to(SimpleNamespace(loader=loader), model, list(numbers)) == numbers


@pytest.mark.parametrize("staged", [False, True, None])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("kind", "ranks"), [("dense", 1), ("dense", 2), ("experts", 2)])
def test_parameters_become_what_the_ranks_send(
    checkpoints: dict[str, list[Path]],
    worker: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    ranks: int,
    dtype: str,
    staged: bool | None,
) -> None:
    """None: it could stage, and another worker could not."""
    import torch

    from skyctl.wire import batches

    monkeypatch.setattr(batches, "_LONG_BYTES", 2048)
    monkeypatch.setattr(batches.batches, "__defaults__", (8192,))
    before, after = checkpoints[kind]
    with vllm_model(after, rank=ranks - 1, ranks=ranks) as model:
        made = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(after, dtype)
    with vllm_model(before, rank=ranks - 1, ranks=ranks) as model:
        report = report_of(model)
        plan = plan_live(trainer.pieces, [report])[report.layout]
        loader = worker(model).loader
        loader.mark_proven(report.layout)
        with trainer.sending(plan) as push:
            for _ in range(2):  # the group stands from push to push
                for parameter in model.parameters():
                    parameter.data.zero_()
                push(loader, bool(staged), has_room=staged is not False)
                for name, parameter in model.named_parameters():
                    assert torch.equal(parameter, made[name]), name
        numbers = trainer.numbers(plan)
        assert come_to(SimpleNamespace(loader=loader), model, list(numbers)) == numbers
        loader.close()


def test_what_a_trainer_has_mapped_stays_until_it_no_longer_fits(
    checkpoints: dict[str, list[Path]], worker: Any
) -> None:
    trainer = Trainer(checkpoints["dense"][1], "bfloat16")
    with vllm_model(checkpoints["dense"][0]) as model:
        report = report_of(model)
        plan = plan_live(trainer.pieces, [report])[report.layout]
        loader = worker(model).loader
        loader._worker.device = SimpleNamespace(type="cuda")  # as its report asks
        loader._worker.vllm_config.parallel_config.data_parallel_size = 1
        program, rows = plan.program, trainer.rows(plan)

        def mapped() -> None:
            loader._worker.device = SimpleNamespace(type="cpu")
            loader.map(program, rows, "key", False)
            loader._worker.device = SimpleNamespace(type="cuda")

        mapped()
        assert loader.report(key="key").opened == "key"
        assert loader.report(key="another").opened == ""
        mapped()
        assert loader.report().opened == ""  # a push from files
        mapped()
        parameter = next(iter(model.parameters()))
        parameter.data = parameter.data.clone()
        assert loader.report(key="key").opened == ""
        mapped()
        norm = model.model.norm
        norm.weight = type(norm.weight)(norm.weight.data.clone(), requires_grad=False)
        assert loader.report(key="key").opened == ""
        mapped()
        assert loader.report(key="key").opened == "key"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layers_that_process_their_weights_do_so_beside_serving(
    tmp_path: Path,
    checkpoints: dict[str, list[Path]],
    worker: Any,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
) -> None:
    import torch
    from vllm import _custom_ops

    def quantized(weight: Any, scale: Any, **_: Any) -> tuple[Any, Any]:
        return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", quantized)
    before, after = checkpoints["dense"]
    with vllm_model(after, quantization="fp8_per_tensor") as model:
        made = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = Trainer(after, dtype)
    with vllm_model(before, quantization="fp8_per_tensor") as model:
        report = report_of(model)
        plan = plan_live(trainer.pieces, [report])[report.layout]
        loader = worker(model).loader
        loader.mark_proven(report.layout)
        loader.map(plan.program, trainer.rows(plan), "key", True)
        for _ in range(2):
            loader.stage()
            loader.load(None, last=True)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, made[name]), name
        numbers = trainer.numbers(plan)
        assert come_to(SimpleNamespace(loader=loader), model, list(numbers)) == numbers
