"""Tiny checkpoints: deterministic, different by seed, in as many shards as asked for."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from skyctl.checkpoints.tiny import make_tiny_checkpoint
from skyctl.errors import ConflictError, SkyctlError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("tiny")
    make_tiny_checkpoint(root / "a", seed=1)
    make_tiny_checkpoint(root / "again", seed=1)
    make_tiny_checkpoint(root / "b", seed=2)
    make_tiny_checkpoint(
        root / "shards", seed=1, shard_bytes=300_000, tie_word_embeddings=True, dtype="bfloat16"
    )
    return root


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    loaded = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    loaded.pop("__metadata__", None)
    return dict(loaded)


def test_the_same_seed_gives_the_same_bytes(made: Path) -> None:
    assert contents(made / "a") == contents(made / "again")


def test_another_seed_changes_the_weights_and_nothing_else(made: Path) -> None:
    a, b = contents(made / "a"), contents(made / "b")
    assert {name for name in a if a[name] != b[name]} == {"model.safetensors"}


def test_the_embedding_is_clearly_the_largest_tensor(made: Path) -> None:
    tensors = header(made / "a/model.safetensors")
    sizes = {name: e["data_offsets"][1] - e["data_offsets"][0] for name, e in tensors.items()}
    largest = sizes["model.embed_tokens.weight"]
    others = [n for name, n in sizes.items() if "embed" not in name and name != "lm_head.weight"]
    assert largest == 256 * 1024
    assert max(others) <= largest // 2
    assert {entry["dtype"] for entry in tensors.values()} == {"F32"}


def test_shards_come_with_an_index(made: Path) -> None:
    index = json.loads((made / "shards/model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (made / "shards").glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(set(index["weight_map"].values())) == shards
    assert "lm_head.weight" not in index["weight_map"]  # tied to the embedding
    assert header(made / "shards" / shards[0]).popitem()[1]["dtype"] == "BF16"


def test_greedy_answers_differ_by_seed_and_by_prompt(made: Path) -> None:
    import torch
    import transformers

    answers = set()
    for name in ("a", "b"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(made / name)
        model = transformers.AutoModelForCausalLM.from_pretrained(made / name)
        for prompt in ("The fleet", "One two"):
            ids = torch.tensor([tokenizer.encode(prompt)])
            tokens = model.generate(input_ids=ids, max_new_tokens=16, do_sample=False)[0].tolist()
            assert len(set(tokens)) > 6
            answers.add(tuple(tokens[ids.shape[1] :]))
    assert len(answers) == 4


def test_any_text_survives_the_tokenizer(made: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(made / "a")
    text = "Größe 東京 🚀\n\tx"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_something_else_in_the_place_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(ConflictError, match="exists already"):
            make_tiny_checkpoint(place, seed=1)


def test_without_torch_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def without_torch(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    with pytest.raises(SkyctlError, match="torch") as caught:
        make_tiny_checkpoint(tmp_path / "a", seed=1)
    assert "scripts/setup.sh" in caught.value.hint
