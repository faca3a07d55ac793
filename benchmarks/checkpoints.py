"""Random checkpoints of real shapes, written fast.

    python -m benchmarks.checkpoints DIR --shape qwen3-8b

Weights are normal with a small deviation, so that a server can load and run them. Needs torch,
and uses a GPU to draw the numbers when there is one.
"""

from __future__ import annotations

import argparse
import json
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SMALL: dict[str, int | bool] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
    "tie_word_embeddings": False,
}
_MOE: dict[str, int | bool] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
SHAPES: dict[str, dict[str, int | bool]] = {
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "qwen3-4-layers": {
        **_SMALL,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 4096,
    },
    "qwen3-0.5b": _SMALL,
    "qwen3-0.5b-tied": {**_SMALL, "tie_word_embeddings": True},
    "qwen3-30b-a3b-24": {**_MOE, "num_hidden_layers": 24},  # half of its layers
    "qwen3-30b-a3b": _MOE,
    "qwen3-moe-0.6b": {
        **_SMALL,
        "num_hidden_layers": 12,
        "moe_intermediate_size": 512,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    },
}
HEAD_DIM = 128
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4 * 10**9


def tensor_shapes(shape: dict[str, int | bool]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Qwen3 checkpoint, dense or with experts, in checkpoint order."""
    hidden = int(shape["hidden_size"])
    heads, kv_heads = int(shape["num_attention_heads"]), int(shape["num_key_value_heads"])
    vocab = int(shape["vocab_size"])
    tensors: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab, hidden))]
    for layer in range(int(shape["num_hidden_layers"])):
        at = f"model.layers.{layer}."
        tensors += [
            (at + "input_layernorm.weight", (hidden,)),
            (at + "self_attn.q_proj.weight", (heads * HEAD_DIM, hidden)),
            (at + "self_attn.k_proj.weight", (kv_heads * HEAD_DIM, hidden)),
            (at + "self_attn.v_proj.weight", (kv_heads * HEAD_DIM, hidden)),
            (at + "self_attn.q_norm.weight", (HEAD_DIM,)),
            (at + "self_attn.k_norm.weight", (HEAD_DIM,)),
            (at + "self_attn.o_proj.weight", (hidden, heads * HEAD_DIM)),
            (at + "post_attention_layernorm.weight", (hidden,)),
            *_mlp_shapes(at + "mlp.", shape),
        ]
    tensors.append(("model.norm.weight", (hidden,)))
    if not shape["tie_word_embeddings"]:
        tensors.append(("lm_head.weight", (vocab, hidden)))
    return tensors


def _mlp_shapes(at: str, shape: dict[str, int | bool]) -> list[tuple[str, tuple[int, ...]]]:
    hidden, experts = int(shape["hidden_size"]), int(shape.get("num_experts", 0))
    inner = int(shape["moe_intermediate_size" if experts else "intermediate_size"])
    found: list[tuple[str, tuple[int, ...]]] = []
    for prefix in [f"{at}experts.{expert}." for expert in range(experts)] or [at]:
        found += [
            (prefix + "gate_proj.weight", (inner, hidden)),
            (prefix + "up_proj.weight", (inner, hidden)),
            (prefix + "down_proj.weight", (hidden, inner)),
        ]
    return [(at + "gate.weight", (experts, hidden)), *found] if experts else found


def write_checkpoint(
    directory: Path, shape_name: str, seed: int, *, same: Path | None = None, differing: int = 0
) -> int:
    """Write config, tokenizer, shards and index; returns the bytes of tensor data.

    With `same`, a checkpoint of this shape, all but the first `differing` shards are its files.
    """
    shape = SHAPES[shape_name]
    directory.mkdir(parents=True, exist_ok=True)
    kind = "Moe" if "num_experts" in shape else ""
    config = {
        "architectures": [f"Qwen3{kind}ForCausalLM"],
        "model_type": "qwen3_moe" if kind else "qwen3",
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
        **shape,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(directory)
    shards = _split(tensor_shapes(shape))
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    index = {t: n for n, shard in zip(names, shards, strict=True) for t, _ in shard}
    total = sum(_bytes(s) for shard in shards for _, s in shard)
    with ThreadPoolExecutor(12) as pool:
        jobs = [
            pool.submit(_write_shard, directory / name, shard, seed * 1000 + number)
            for number, (name, shard) in enumerate(zip(names, shards, strict=True))
            if same is None or number < differing
        ]
        if same is not None:
            for name in names[differing:]:
                (directory / name).hardlink_to(same / name)
        for job in jobs:
            job.result()
    # last: a checkpoint that has its index is whole
    (directory / INDEX).write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return total


def two_checkpoints(scratch: Path, shape_name: str, *, differing: int = 0) -> list[Path]:
    """Two checkpoints of one shape in `scratch`; those that are there already are used again.

    With `differing`, they share the files of all shards but so many: where memory is scarce.
    """
    made = [scratch / f"{shape_name}-{seed}" for seed in (1, 2)]
    for seed, checkpoint in enumerate(made, 1):
        if not (checkpoint / INDEX).exists():
            same = made[0] if differing and seed > 1 else None
            write_checkpoint(checkpoint, shape_name, seed, same=same, differing=differing)
    return made


def _bytes(shape: tuple[int, ...]) -> int:
    count = 2
    for size in shape:
        count *= size
    return count


def _split(
    tensors: list[tuple[str, tuple[int, ...]]],
) -> list[list[tuple[str, tuple[int, ...]]]]:
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in tensors:
        if filled and filled + _bytes(shape) > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape))
        filled += _bytes(shape)
    return shards


def _write_shard(path: Path, tensors: list[tuple[str, tuple[int, ...]]], seed: int) -> None:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device=device).manual_seed(seed)
    header: dict[str, object] = {}
    offset = 0
    for name, shape in tensors:
        end = offset + _bytes(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name, shape in tensors:
            if name.endswith("norm.weight"):
                values = torch.ones(shape, device=device, dtype=torch.bfloat16)
            else:
                values = torch.empty(shape, device=device, dtype=torch.bfloat16)
                values.normal_(0, 0.02, generator=generator)
            file.write(values.cpu().view(torch.uint8).numpy().data)


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0, **{letter: i + 1 for i, letter in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>"
    ).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    total = write_checkpoint(options.directory, options.shape, options.seed)
    print(f"{options.directory}: {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
