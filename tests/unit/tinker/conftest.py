"""A tiny base model for the whole session, and a trainer of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.tiny import make_tiny_checkpoint

if TYPE_CHECKING:
    from skyctl.tinker.adapter import Base
    from skyctl.tinker.trainer import Trainer


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the base under its name in the API, where the SDK finds it too."""
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("base")
    make_tiny_checkpoint(root / "org" / "tiny", seed=1)
    return root


@pytest.fixture(scope="module")
def base(tiny_base: Path) -> Base:
    from skyctl.tinker.adapter import Base

    return Base(str(tiny_base / "org" / "tiny"), device="cpu", dtype="float32")


@pytest.fixture
def trainer(base: Base) -> Trainer:
    """One model with a B that is not zero, so that A has a gradient too."""
    import torch

    from skyctl.tinker.trainer import Trainer
    from tests.unit.tinker.passes import LORA

    trainer = Trainer(base, name="org/tiny", batch_tokens=16)
    trainer.create("m", LORA)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for name, value in trainer.models["m"].parameters.items():
            if name.endswith("lora_B"):
                value.copy_(0.05 * torch.randn(value.shape, generator=generator))
    return trainer
