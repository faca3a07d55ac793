"""A tiny base model, and one API process with its worker for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyctl.checkpoints.tiny import make_tiny_checkpoint
from tests.unit.tinker.serving import ServingProcess


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the base under its name in the API, where the SDK finds it too."""
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("base")
    make_tiny_checkpoint(root / "org" / "tiny", seed=1)
    return root


@pytest.fixture(scope="session")
def serving(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    pytest.importorskip("tinker")
    process = ServingProcess(
        tmp_path_factory.mktemp("tinker") / "d", tiny_base / "org" / "tiny", gap_s=20.0
    )
    process.start()
    yield process
    assert process.stop() == 0
