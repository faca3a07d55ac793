"""One API process with its worker for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.tinker.serving import ServingProcess
from tests.unit.tinker.conftest import tiny_base as tiny_base


@pytest.fixture(scope="session")
def serving(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingProcess]:
    pytest.importorskip("tinker")
    process = ServingProcess(
        tmp_path_factory.mktemp("tinker") / "d", tiny_base / "org" / "tiny", forked=True, gap_s=20.0
    )
    process.start()
    yield process
    assert process.stop() == 0
