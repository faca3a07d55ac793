"""Finding a stored checkpoint in the ledgers of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.core.registry import remember, select
from skyctl.errors import NotFoundError
from skyctl.store.paths import fleet_paths
from skyctl.tinker.stored import find_checkpoint
from tests.unit.tinker.stored import store_checkpoint


def test_a_fleet_that_cannot_be_read_is_named_and_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c"):
        text = f"name: {name}\nmodel: org/tiny\nlora: {{max_rank: 32}}\ntinker: {{}}\n"
        Path("fleet.yaml").write_text(text)
        remember(select(None, None))
    ledger = fleet_paths("a").tinker / "ledger.sqlite"
    ledger.parent.mkdir(exist_ok=True)
    ledger.write_bytes(b"not a database" * 100)
    fleet_paths("b").fleet_file.write_text("name: [")
    store_checkpoint(fleet_paths("c").tinker)
    assert find_checkpoint("tinker://run/weights/final").fleet == "c"
    with pytest.raises(NotFoundError, match=r"not read: fleet a \(cannot read .*; fleet b \("):
        find_checkpoint("tinker://run/weights/other")
