"""What workers say of their parameters, held against what vLLM's own loader made of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.transfer.plan import (
    ChunkPlan,
    Packing,
    check_layouts,
    order_for_runtime,
    plan_chunks,
    program_for,
)
from skyctl.wire.layouts import LayoutReport, Program, layout_digest
from tests.tiny import make_tiny_checkpoint
from tests.unit.engines.layout_loads import KINDS, Loader, come_to, report_of
from tests.unit.engines.vllm_models import vllm_model

pytestmark = pytest.mark.usefixtures("vllm")

CASES = [
    (kind, rank, ranks, False) for kind in KINDS for rank, ranks in ((0, 1), (0, 2), (1, 2), (3, 4))
] + [("experts", rank, 2, True) for rank in (0, 1)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layouts")
    return {
        kind: make_tiny_checkpoint(root / kind, seed=3, dtype="bfloat16", **arguments)
        for kind, arguments in KINDS.items()
    }


def planned(
    reports: list[LayoutReport], checkpoint: Checkpoint, size: int, packing: Packing = "fit"
) -> ChunkPlan:
    check_layouts(reports, checkpoint.tensors)
    return plan_chunks(
        checkpoint.tensors,
        size,
        packing=packing,
        alignment=1,
        order=lambda tensors: order_for_runtime(reports, tensors),
    )


def chunks_of(checkpoint: Checkpoint, plan: ChunkPlan) -> list[Any]:
    """The bytes of every chunk, as flat uint8 tensors."""
    import torch

    files = [Path(shard.path).read_bytes() for shard in checkpoint.shards]
    chunks = []
    for chunk in plan.chunks:
        octets = torch.zeros(chunk.size, dtype=torch.uint8)
        for placed in chunk.placed:
            tensor = placed.tensor
            data = files[tensor.shard][tensor.begin : tensor.begin + tensor.nbytes]
            octets[placed.offset : placed.offset + tensor.nbytes] = torch.frombuffer(
                bytearray(data), dtype=torch.uint8
            )
        chunks.append(octets)
    return chunks


@pytest.mark.parametrize(("kind", "rank", "ranks", "expert_parallel"), CASES)
def test_copied_parameters_are_what_vllms_loader_makes(
    checkpoints: dict[str, Path],
    kind: str,
    rank: int,
    ranks: int,
    expert_parallel: bool,
) -> None:
    checkpoint = read_checkpoint(str(checkpoints[kind]))
    with vllm_model(
        checkpoints[kind], rank=rank, ranks=ranks, expert_parallel=expert_parallel
    ) as model:
        report = report_of(model)
        made = dict(model.named_parameters())
        assert len(report.parameters) == len({p.data_ptr() for p in model.parameters()})
        for size, packing in ((1 << 30, "fit"), (70_000, "overflow")):
            plan = plan_chunks(
                checkpoint.tensors,
                size,
                packing=packing,  # type: ignore[arg-type]
                alignment=1,
                order=lambda tensors: order_for_runtime([report], tensors),
            )
            _assert_carried_over(program_for(report, plan), chunks_of(checkpoint, plan), made)


def _assert_carried_over(program: Program, chunks: list[Any], made: dict[str, Any]) -> None:
    """The program fills each parameter as it is, and the sender's numbers are theirs."""
    import torch

    from skyctl.transfer.gpu.numbering import Numbering
    from skyctl.wire.copies import copy_runs, octets_of
    from skyctl.wire.device_digest import digest_on_device

    names = [name for name, _, _ in program.parameters]
    targets = {place: torch.zeros_like(octets_of(made[name])) for place, name in enumerate(names)}
    numbering, numbers = Numbering([program], "cpu"), {}
    for number, octets in enumerate(chunks):
        copy_runs([c for c in program.copies if c.chunk == number], octets, targets)
        numbers |= numbering.add(number, octets)[0]
    for place, name in enumerate(names):
        assert torch.equal(targets[place], octets_of(made[name])), name
    held = digest_on_device([made[name] for name in names])
    assert numbers == dict(zip(names, held, strict=True))


def test_fused_parameters_of_one_rank_are_one_copy_each(checkpoints: dict[str, Path]) -> None:
    """What lies side by side in a chunk is not copied piece by piece: 9,400 tensors of a large
    mixture become some 220 copies."""
    for kind, path in checkpoints.items():
        checkpoint = read_checkpoint(str(path))
        with vllm_model(path) as model:
            report = report_of(model)
        program = program_for(report, planned([report], checkpoint, 1 << 30))
        assert len(program.copies) == len(program.parameters), kind


def test_experts_of_tensor_parallel_ranks_are_one_copy_each(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["experts"]
    checkpoint = read_checkpoint(str(path))
    with vllm_model(path, rank=1, ranks=2) as model:
        report = report_of(model)
    plan = plan_chunks(
        checkpoint.tensors,
        1 << 30,
        alignment=1,
        order=lambda tensors: order_for_runtime([report], tensors),
    )
    program = program_for(report, plan)
    experts = [place for place, p in enumerate(program.parameters) if "experts" in p[0]]
    assert experts
    assert all(sum(c.parameter == place for c in program.copies) == 1 for place in experts)


def test_a_report_survives_the_wire(checkpoints: dict[str, Path]) -> None:
    import json

    with vllm_model(checkpoints["experts"]) as model:
        report = report_of(model)
    again = LayoutReport.from_wire(json.loads(json.dumps(report.to_wire())))
    assert again == report
    assert layout_digest(again.parameters) == report.layout


def test_layers_that_are_not_known_are_left_to_the_loader(checkpoints: dict[str, Path]) -> None:
    from skyctl.engines.vllm.inside.layout import describe, whole_problem

    class Fp8LinearMethod:
        pass

    with vllm_model(checkpoints["dense"]) as model:
        layer = model.model.layers[0]
        layer.mlp.down_proj.quant_method = Fp8LinearMethod()
        reasons = {p.name: p.reason for p in describe(model) if p.reason}
        assert reasons == {
            "model.layers.0.mlp.down_proj.weight": "Fp8LinearMethod processes it",
        }
        assert whole_problem(model) == ""
        attention = layer.self_attn.attn
        attention.__class__ = type("MLAAttention", (type(attention),), {})
        assert "MLAAttention" in whole_problem(model)


def test_experts_of_a_backend_that_rearranges_them_are_left_to_the_loader(
    checkpoints: dict[str, Path],
) -> None:
    from skyctl.engines.vllm.inside.layout import describe

    with vllm_model(checkpoints["experts"]) as model:  # the backend of CPUs packs them
        reasons = {p.name: p.reason for p in describe(model) if p.reason}
    assert {name.rpartition(".")[2] for name in reasons} == {"w13_weight", "w2_weight"}
    assert set(reasons.values()) == {"its backend CPU may rearrange experts"}


def test_a_proven_layout_is_copied_through_slots_that_are_filled_again(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    checkpoint = read_checkpoint(str(checkpoints["dense"]))
    with vllm_model(checkpoints["dense"]) as model:
        report = report_of(model)
        plan = planned([report], checkpoint, 70_000)
        program, chunks = program_for(report, plan), chunks_of(checkpoint, plan)
        assert len(chunks) > 3
        made = {name: p.detach().clone() for name, p in model.named_parameters()}
        worker = Loader(model, monkeypatch)
        with pytest.raises(RuntimeError, match="has not been proven"):
            worker.copy(program, plan, chunks, 3)
        worker.loader.mark_proven(report.layout)
        for parameter in model.parameters():
            parameter.data.zero_()
        worker.copy(program, plan, chunks, 3)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, made[name]), name
        with pytest.raises(RuntimeError, match="no program"):
            worker.loader.load([0], last=True)
        worker.loader.open(program, "handle", [0, plan.slot_bytes, 2 * plan.slot_bytes], 0)
        name, parameter = next(iter(model.named_parameters()))
        parameter.data = parameter.data.clone()
        with pytest.raises(RuntimeError, match="not where they were"):
            worker.loader.load([0], last=False)
        worker.loader.report()  # the next push begins: that one was killed
        with pytest.raises(RuntimeError, match="no program"):
            worker.loader.load([0], last=False)


def test_the_last_chunk_may_hold_nothing_that_the_worker_copies(
    tmp_path: Path, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer writes the tied output layer as well, which the loader skips."""
    from safetensors.torch import load_file, save_file

    pushed = tmp_path / "pushed"
    shutil.copytree(checkpoints["tied"], pushed)
    [shard] = pushed.glob("*.safetensors")
    tensors = load_file(shard)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, shard)
    checkpoint = read_checkpoint(str(pushed))
    with vllm_model(checkpoints["tied"]) as model:
        report = report_of(model)
        plan = planned([report], checkpoint, 20_000)
        program = program_for(report, plan)
        assert max(copy.chunk for copy in program.copies) == len(plan.chunks) - 2
        worker = Loader(model, monkeypatch)
        worker.loader.mark_proven(report.layout)
        worker.copy(program, plan, chunks_of(checkpoint, plan), 3)


def replace_data(layer: Any, name: str, tensor: Any) -> None:
    """`replace_parameter` of vLLM 0.33: the parameter stays, with other data."""
    import torch

    old = getattr(layer, name, None)
    if isinstance(old, torch.nn.Parameter):
        old.data = tensor
    else:
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))


@pytest.mark.parametrize("keeps_parameters", [False, True])
@pytest.mark.parametrize("quantization", ["fp8_per_channel", "fp8_per_tensor"])
def test_a_layer_is_processed_beside_the_running_one_as_the_loader_would(
    tmp_path: Path,
    checkpoints: dict[str, Path],
    quantization: str,
    keeps_parameters: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.layers.quantization.online import fp8

    from skyctl.engines.vllm.inside.digest import digest_model
    from skyctl.transfer.gpu.numbering import Numbering

    def quantized(weight: Any, scale: Any, **_: Any) -> tuple[Any, Any]:
        """On CPU vLLM has no kernel for it."""
        return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", quantized)
    if keeps_parameters:
        monkeypatch.setattr(fp8, "replace_parameter", replace_data)
    other = make_tiny_checkpoint(tmp_path / "other", seed=4, dtype="bfloat16")
    with vllm_model(other, quantization=quantization) as model:
        wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
        digest = digest_model(model)["digest"]
    checkpoint = read_checkpoint(str(other))
    with vllm_model(checkpoints["dense"], quantization=quantization) as model:
        report = report_of(model)
        assert sum(one.processed for one in report.parameters) == 8
        plan = planned([report], checkpoint, 70_000)
        program, chunks = program_for(report, plan), chunks_of(checkpoint, plan)
        numbering, expected = Numbering([program], "cpu"), dict[str, int]()
        for number, octets in enumerate(chunks):
            expected |= numbering.add(number, octets)[0]
        worker = Loader(model, monkeypatch)
        with pytest.raises(RuntimeError, match="staged as a whole"):
            worker.loader.open(program, "handle", [0, plan.slot_bytes], 0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        worker.process(program, plan, chunks, keep=False)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]), name
        names = [name for name, _, _ in program.parameters]
        assert come_to(worker, model, names) != expected  # it holds the first checkpoint
        worker.loader.mark_proven(report.layout)
        worker.process(program, plan, chunks, keep=True)
        worker.loader.load(range(len(chunks)), last=True)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, wanted[name]), name
        assert come_to(worker, model, names) == expected
        assert digest_model(model)["digest"] == digest
        next(iter(model.parameters())).data.view(-1)[0] += 1
        scale = dict(model.named_parameters())["model.layers.1.mlp.down_proj.weight_scale"]
        scale.data.view(-1)[0] += 1
        wrong = {n for n, v in come_to(worker, model, names).items() if v != expected[n]}
        assert wrong == {"model.embed_tokens.weight"}
        assert expected.keys() - come_to(worker, model, names).keys() == {
            "model.layers.1.mlp.down_proj.weight"
        }
