"""An adapter merged into its base computes what the trainer does with the adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from skyctl.errors import PreflightError  # noqa: E402
from skyctl.tinker.adapter import Base  # noqa: E402
from skyctl.tinker.export import merge_adapter  # noqa: E402
from skyctl.tinker.trainer import Trainer  # noqa: E402
from tests.tiny import make_tiny_checkpoint  # noqa: E402

LORA = {"rank": 4, "seed": 7, "train_unembed": True, "train_mlp": True, "train_attn": True}
ROW = torch.tensor([5, 300, 41, 8, 77, 260])


def trained(checkpoint: Path, directory: Path) -> tuple[Base, Trainer]:
    """A trainer whose adapter is saved in `directory`."""
    base = Base(str(checkpoint), device="cpu", dtype="float32")
    trainer = Trainer(base, name="org/tiny", batch_tokens=16)
    trainer.create("m", LORA)
    generator = torch.Generator().manual_seed(1)
    for name, value in trainer.models["m"].parameters.items():
        if name.endswith("lora_B"):
            value.data.copy_(0.05 * torch.randn(value.shape, generator=generator))
    trainer.save("m", directory, optimizer=False)
    return base, trainer


@pytest.mark.parametrize("shard_bytes", [None, 500_000], ids=["one file", "sharded"])
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_a_merged_model_computes_what_the_trainer_does(
    tied: bool, shard_bytes: int | None, tmp_path: Path
) -> None:
    checkpoint = make_tiny_checkpoint(
        tmp_path / "base", seed=1, tie_word_embeddings=tied, shard_bytes=shard_bytes
    )
    base, trainer = trained(checkpoint, tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", str(checkpoint), tmp_path / "model")
    merged = Base(str(tmp_path / "model"), device="cpu", dtype="float32")
    with torch.no_grad():
        plain = base.logits(base.hidden([ROW]))
        with base.using(trainer.models["m"].parameters):
            expected = base.logits(base.hidden([ROW]))
        logits = merged.logits(merged.hidden([ROW]))
    assert torch.allclose(logits, expected, atol=1e-4)
    assert not torch.allclose(plain, expected, atol=1e-2)


def test_all_of_the_base_but_its_weights_comes_along(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "base", seed=1)
    trained(checkpoint, tmp_path / "adapter")
    others = {"modeling_tiny.py", "vocab.tiktoken", "merges.txt", "LICENSE"}
    for name in (*others, "pytorch_model.bin", "pytorch_model.bin.index.json"):
        (checkpoint / name).write_text(name)
    merge_adapter(tmp_path / "adapter", str(checkpoint), tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names >= others | {"config.json", "model.safetensors"}
    assert not [name for name in names if name.startswith("pytorch_model")]


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint = make_tiny_checkpoint(tmp_path / "base", seed=1)
    trained(checkpoint, tmp_path / "adapter")
    other = make_tiny_checkpoint(tmp_path / "other", seed=1, experts=4)
    with pytest.raises(PreflightError, match=r"no weights of its own for model\.layers\.0\.mlp"):
        merge_adapter(tmp_path / "adapter", str(other), tmp_path / "model")
    assert not (tmp_path / "model").exists()
