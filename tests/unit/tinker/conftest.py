"""A tiny base model for the whole session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that holds the base under its name in the API, where the SDK finds it too."""
    pytest.importorskip("torch")
    root = tmp_path_factory.mktemp("base")
    make_tiny_checkpoint(root / "org" / "tiny", seed=1)
    return root
