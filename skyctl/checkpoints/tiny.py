"""Tiny checkpoints made on the spot, to try a whole fleet without a download or a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyctl.errors import ConflictError, SkyctlError

TINY_SEEDS = {"a": 1, "b": 2}

# vocabulary x hidden size: in float32 the embedding is 512 x 128 x 4 = 256 KiB, every other tensor
# 128 KiB at most, so that a chunk size between the two must make a chunk grow
_VOCABULARY = 512
_HIDDEN = 128
_TEXT = (
    "The fleet came up, and every server answered before the kettle had boiled. ",
    "Freeze the fleet, push the weights, thaw the fleet, and carry on where you stopped. ",
    "A replica counts tokens quietly while the router listens for another question. ",
    "One two three four five six seven eight nine ten eleven twelve thirteen twenty. ",
    "Small models dream of large clusters; large models dream of quick restarts. ",
    "Yesterday a checkpoint crossed the network in chunks, and nobody noticed it. ",
    "Morning light, green hills, slow river, warm bread, black coffee, open window. ",
    "Please describe what happens when somebody pauses a generation halfway through. ",
)
_BYTE_TOKENS = 257  # the end token and one token per byte come first in the vocabulary


def require_libraries() -> None:
    """Import what makes a tiny checkpoint. Raises SkyctlError if it is not installed."""
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise SkyctlError(
            f"tiny checkpoints need torch and transformers, which the base install leaves out "
            f"({error})",
            hint="in skyctl's clone: bash scripts/setup.sh; or bring a model: "
            "skyctl init --model Qwen/Qwen3-0.6B",
        ) from error


def make_tiny_checkpoint(
    directory: Path,
    *,
    seed: int,
    dtype: str = "float32",
    shard_bytes: int | None = None,
    tie_word_embeddings: bool = False,
    experts: int = 0,
) -> Path:
    """Write a randomly initialised Qwen3 and its tokenizer: about 2 MB, in a few seconds.

    The same arguments give the same bytes; different seeds give different greedy answers, with the
    same tokenizer. `shard_bytes` cuts the weights into shards of at most that size (but at least
    one tensor each), with an index. `experts` makes it a mixture (Qwen3-MoE) of that many, two of
    which compute each token.

    Raises:
        ConflictError: there is something else at `directory`.
        SkyctlError: torch or transformers is not installed.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConflictError(f"{directory} exists already", hint="remove it, or choose another name")
    require_libraries()
    import torch
    import transformers

    tokenizer = _tokenizer(transformers)
    config = _config(transformers, len(tokenizer), experts, tie_word_embeddings)
    with torch.random.fork_rng(devices=[]):  # the caller's random state is left alone
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        _make_lively(model)
    options = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    with _without_progress_bars(transformers):
        model.to(getattr(torch, dtype)).save_pretrained(directory, **options)
        tokenizer.save_pretrained(directory)
    return directory


def _config(transformers: Any, vocabulary: int, experts: int, tied: bool) -> Any:
    mixture = {
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": _HIDDEN // 2,
        "norm_topk_prob": True,
    }
    return (transformers.Qwen3MoeConfig if experts else transformers.Qwen3Config)(
        **(mixture if experts else {}),
        vocab_size=vocabulary,
        hidden_size=_HIDDEN,
        intermediate_size=_HIDDEN * 2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


@contextmanager
def _without_progress_bars(transformers: Any) -> Iterator[None]:
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _make_lively(model: Any) -> None:
    """Give the random model answers worth reading.

    With the usual small initialisation a greedy answer repeats one token. Layers as large as the
    embedding make it depend on the prompt and on every layer; rows of single bytes and of the end
    token are made small, so that answers are words and do not stop early.
    """
    import torch

    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:  # experts are stacked
                loud = "embed" in name and not tied
                parameter.normal_(std=1.0 if loud else parameter.shape[-1] ** -0.5)
        model.get_output_embeddings().weight[:_BYTE_TOKENS] *= 0.1


def _tokenizer(transformers: Any) -> Any:
    """A byte-level BPE tokenizer: any text round-trips."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        _TEXT,
        tokenizers.trainers.BpeTrainer(
            vocab_size=_VOCABULARY,
            special_tokens=["<|end|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        chat_template=_CHAT_TEMPLATE,
    )


_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
