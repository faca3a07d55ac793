"""How long the plan of a live push takes for a model of 1T parameters; no GPU, no torch.

    python -m benchmarks.live_plan [--servers 8] [--replicate 2]

61 layers of 384 experts, 256 trainer ranks: expert parallel over 64 and sharded over the others of
a group (FSDP), everything else sharded over all; `--replicate` groups of ranks hold the same
(HSDP). 128 server ranks: `--servers` of them, each tensor and expert parallel. Prints one JSON
object: seconds of it and of a processor, those to list all copies, the bytes that workers need and
that ranks send, and the balance.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterator

from skyctl.live.blocks import Block
from skyctl.live.plan import Piece, balance, plan_live
from skyctl.wire.layouts import LayoutReport, ParameterLayout, Part, layout_digest

LAYERS, EXPERTS, HIDDEN, INNER, VOCABULARY = 61, 384, 7168, 2048, 163840
HEADS, HEAD, EXPERT_GROUPS = 64, 128, 64
ITEM = 2
DENSE = {
    "input_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "post_attention_layernorm": (HIDDEN,),
    "mlp.gate": (EXPERTS, HIDDEN),
    "mlp.shared_experts.gate_proj": (INNER, HIDDEN),
    "mlp.shared_experts.up_proj": (INNER, HIDDEN),
    "mlp.shared_experts.down_proj": (HIDDEN, INNER),
}
EXPERT = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def dense_tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    """All tensors but those of experts."""
    for layer in range(LAYERS):
        for name, shape in DENSE.items():
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def shard(name: str, shape: tuple[int, ...], number: int, count: int) -> Block:
    """Part `number` of `count` by rows, as FSDP cuts."""
    step = -(-shape[0] // count)
    begin = min(shape[0], number * step)
    rows = min(shape[0], begin + step) - begin
    start = (begin, *[0] * (len(shape) - 1))
    return Block(name, "bfloat16", shape, start, (rows, *shape[1:]))


def trainer(ranks: int, replicate: int) -> list[list[Piece]]:
    """What each rank has."""
    group = ranks // replicate
    across = group // EXPERT_GROUPS
    found = []
    for rank in range(ranks):
        own = rank % group
        blocks = [shard(name, shape, own, group) for name, shape in dense_tensors()]
        expert_group, part = divmod(own, across)
        each = EXPERTS // EXPERT_GROUPS
        blocks += [
            shard(f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", shape, part, across)
            for layer in range(LAYERS)
            for expert in range(expert_group * each, (expert_group + 1) * each)
            for name, shape in EXPERT.items()
        ]
        found.append([Piece(block, export) for export, block in enumerate(blocks) if block.size[0]])
    return found


def rows(name: str, shape: tuple[int, ...], number: int, count: int, target: int) -> Part:
    size = math.prod(shape) // count
    return Part(name, shape, 1, size, number * size, size, target, size)


def columns(name: str, shape: tuple[int, ...], number: int, count: int, target: int) -> Part:
    width = shape[1] // count
    return Part(name, shape, shape[0], width, number * width, shape[1], target, width)


def fused(name: str, *parts: Part) -> ParameterLayout:
    size = sum(part.rows * part.row for part in parts)
    return ParameterLayout(name, "bfloat16", (size,), parts)


def side_by_side(at: str, names: tuple[str, ...], rank: int, ranks: int) -> list[Part]:
    """Projections by rows, one after another."""
    made: list[Part] = []
    for name in names:
        target = sum(part.row for part in made)
        made.append(rows(f"{at}{name}.weight", DENSE[name], rank, ranks, target))
    return made


def server(rank: int, ranks: int) -> LayoutReport:
    """A worker that is tensor parallel, and holds whole experts."""
    made = []
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm", "mlp.gate"):
            made.append(fused(at + name, rows(f"{at}{name}.weight", DENSE[name], 0, 1, 0)))
        for name in ("self_attn.o_proj", "mlp.shared_experts.down_proj"):
            part = columns(f"{at}{name}.weight", DENSE[name], rank, ranks, 0)
            made.append(fused(at + name, part))
        made.append(fused(f"{at}self_attn.qkv_proj", *side_by_side(at, qkv, rank, ranks)))
        made.append(fused(f"{at}shared.gate_up_proj", *side_by_side(at, gate_up, rank, ranks)))
        w13, w2, size = list[Part](), list[Part](), INNER * HIDDEN
        for local, expert in enumerate(range(rank, EXPERTS, ranks)):
            expert_at = f"{at}mlp.experts.{expert}."
            for number, name in enumerate(("gate_proj", "up_proj")):
                target = (local * 2 + number) * size
                w13.append(rows(f"{expert_at}{name}.weight", EXPERT[name], 0, 1, target))
            w2.append(rows(f"{expert_at}down_proj.weight", EXPERT["down_proj"], 0, 1, local * size))
        made += [fused(f"{at}experts.w13", *w13), fused(f"{at}experts.w2", *w2)]
    for name, shape in list(dense_tensors())[-3:]:
        split = (0, 1) if len(shape) == 1 else (rank, ranks)
        made.append(fused(name, rows(name, shape, *split, 0)))
    parameters = tuple(made)
    return LayoutReport(rank, layout_digest(parameters), parameters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--server-ranks", type=int, default=128)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--replicate", type=int, default=1)
    options = parser.parse_args()
    ranks = trainer(options.ranks, options.replicate)
    size = options.server_ranks // options.servers
    workers = [server(rank, size) for rank in range(size)]
    began, cpu = time.perf_counter(), time.process_time()
    plans = plan_live(ranks, workers)
    seconds = time.perf_counter() - began
    cpu = time.process_time() - cpu
    copies = sum(len(plan.rows) for plan in plans.values())
    listed = time.perf_counter() - began - seconds
    sent: Counter[int] = Counter()
    for worker in workers:
        for rank, count in plans[worker.layout].bytes_by_rank().items():
            sent[rank] += count * options.servers
    needed = options.servers * sum(
        math.prod(p.shape) * ITEM for worker in workers for p in worker.parameters
    )
    found = {
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu, 2),
        "listed_s": round(listed, 2),
        "parameters": sum(math.prod(block.size) for blocks in ranks for block, _, _ in blocks)
        // options.replicate,
        "blocks": sum(map(len, ranks)),
        "layouts": len(plans),
        "copies": copies,
        "bytes_needed": needed,
        "bytes_sent": sent.total(),
        "balance": round(balance(sent, options.ranks), 3),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
