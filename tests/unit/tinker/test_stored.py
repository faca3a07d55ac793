"""Finding a stored checkpoint in the ledgers of this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyctl.core.registry import remember, select
from skyctl.errors import NotFoundError
from skyctl.store.paths import fleet_paths
from skyctl.tinker.stored import delete_checkpoints, find_checkpoint
from tests.unit.tinker.stored import FINAL, store_checkpoint


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
    assert find_checkpoint(FINAL).fleet == "c"
    with pytest.raises(NotFoundError, match=r"not read: fleet a \(cannot read .*; fleet b \("):
        find_checkpoint("tinker://run/weights/other")


def test_one_that_was_overwritten_is_deleted_by_its_own_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    text = "name: a\nmodel: org/tiny\nlora: {max_rank: 32}\ntinker: {port: 9}\n"
    Path("fleet.yaml").write_text(text)
    overwritten, requested = f"{FINAL}#/runs/checkpoints/1f", list[str]()
    store_checkpoint(fleet_paths("a").tinker, overwritten)

    async def delete(self: Any, url: str) -> httpx.Response:
        requested.append(httpx.URL(url).path)
        return httpx.Response(204)

    monkeypatch.setattr(httpx.AsyncClient, "delete", delete)
    asyncio.run(delete_checkpoints(select(None, None), [overwritten]))
    [path] = requested
    assert path.endswith("/checkpoints/weights/final#/runs/checkpoints/1f")
