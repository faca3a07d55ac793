"""Servers that a look-up puts elsewhere keep their own records, and what a push does to them."""

from __future__ import annotations

from pathlib import Path

from skyctl.push.request import PushRequest
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.service.attached_stubs import Servers, break_off, servers

__all__ = ["servers"]


async def test_a_push_into_a_suspect_scrubs_it_and_leaves_it_paused(
    servers: Servers, tmp_path: Path
) -> None:
    first = servers.other(0, "127.0.0.1:1")
    async with servers.fleet([first, servers.urls[1]]) as fleet:
        await break_off(servers, fleet, 1, "far-1")
    async with servers.fleet([first, servers.other(1, "127.0.0.1:2")]) as fleet:
        checkpoint = write_checkpoint(tmp_path / "new", tiny_tensors(2))
        job = await fleet.wait_job(
            await fleet.start_push(PushRequest(str(checkpoint))), timeout_s=30
        )
        assert job.state == "succeeded", job.error
        first, second = (stub.engine for stub in servers.stubs[:2])
        assert (first.paused, second.paused) == (False, True)
        assert first.digest == second.digest
    assert "half loaded" not in servers.served


async def test_a_given_name_that_moves_takes_no_record_along(
    servers: Servers, tmp_path: Path
) -> None:
    listing, (first, second, third) = tmp_path / "servers.txt", servers.urls
    listing.write_text(f"a {first}\nb {second}\n")
    async with servers.fleet({"command": "cat servers.txt"}) as fleet:
        await break_off(servers, fleet, 0, "a")
        listing.write_text(f"a {second}\nb {first}\n")
        found = {row.server: row.condition for row in await fleet.findings()}
        assert found == {"a": "healthy", "b": "half-updated"}  # before names are on record
        outcomes = {row.server: row.status for row in await fleet.resume()}
        assert outcomes == {"a": "ok", "b": "skipped"}
        listing.write_text(f"a {second}\nb {third}\n")
        assert [row.ok for row in await fleet.resume()] == [True, True]
        [missing] = [row for row in await fleet.findings() if row.action != "nothing"]
        assert missing.server == f"b@{first}" and first in missing.detail
    assert "half loaded" not in servers.served
