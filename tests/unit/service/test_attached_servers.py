"""Servers that a list or a look-up puts elsewhere keep their own records."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyctl.core import observation
from skyctl.core.observation import Observed
from skyctl.core.registry import FleetRef
from skyctl.core.requests import Pause, Resume, SaveWeights, Sleep, Wake
from skyctl.errors import PreflightError
from skyctl.service import attached_recovery
from skyctl.store.fleet_weights import FleetWeights
from tests.stub import rows
from tests.unit.service.attached_stubs import Servers, break_off, servers

__all__ = ["servers"]

PAUSE = Pause(mode="keep", clear_cache=False)
Edit = Callable[..., Any]


@pytest.mark.parametrize(
    ("edited", "broken"),
    [
        pytest.param(lambda a, b, c: [b, c], "far-1", id="the first is dropped"),
        pytest.param(lambda a, b, c: [b, a, c], "far-1", id="reordered"),
        pytest.param(lambda a, b, c: ["http://new:1", a, b, c], "far-1", id="one is inserted"),
        pytest.param(lambda a, b, c: [a, f"{b}:80/".replace("stub", "STUB")], "far-1", id="case"),
    ],
)
async def test_an_edited_list_gives_no_server_the_record_of_another(
    servers: Servers, edited: Edit, broken: str
) -> None:
    async with servers.fleet(servers.urls) as fleet:
        await break_off(servers, fleet, 1, "far-1")
    servers.other(1, "STUB-1:80")
    async with servers.fleet(edited(*servers.urls)) as fleet:
        thawed = {row.server: row for row in await fleet.resume(Resume())}
        assert thawed[broken].status == "skipped" and "skyctl recover" in thawed[broken].detail
        status = {row.name: row.state for row in (await fleet.status()).replicas}
        assert list(status) == [row.server for row in await fleet.pause(PAUSE)]
        assert status[broken] == "quarantined"
        await fleet.wake(Wake())
        found = {row.server: row.condition for row in await fleet.findings()}
        assert found[broken] == "half-updated"
        await fleet.recover()
        await fleet.resume()
    assert "half loaded" not in servers.served


@pytest.mark.parametrize("state", ["paused", "asleep"])
async def test_a_server_that_appears_frozen_while_one_is_in_doubt_is_not_thawed(
    servers: Servers, state: str
) -> None:
    """It may be that one, by another spelling of its URL."""
    async with servers.fleet(servers.urls[:2]) as fleet:
        await break_off(servers, fleet, 1, "far-1")
        if state == "asleep":
            servers.stubs[1].engine.asleep, servers.stubs[1].engine.sleep_level = {"weights"}, 1
    respelled = [servers.urls[0], servers.other(1, "127.0.0.1")]
    async with servers.fleet(respelled) as fleet:
        found = {row.server: row.condition for row in await fleet.findings()}
        assert found["far-2"] == "half-updated"  # also before it is on record
        await fleet.pause(PAUSE)  # does not make it one that skyctl has paused
        for verb in (fleet.resume, fleet.wake):
            outcome = (await verb())[1]
            assert outcome.status == "skipped", outcome
            for words in (f"found {state}", "far-1 (http://stub-1)", "type: skyctl recover"):
                assert words in outcome.detail
        if state == "asleep":
            return
        _, healed, *_ = await fleet.recover()
        assert healed.ok, healed
        assert servers.stubs[1].engine.paused  # whoever paused it, it was not skyctl
        assert (await fleet.resume())[1].ok
    assert "half loaded" not in servers.served
    async with servers.fleet(servers.urls[:2]) as fleet:  # its own record is still there
        assert [row.state for row in (await fleet.status()).replicas][1] == "quarantined"


async def test_so_is_a_second_spelling_beside_the_first(servers: Servers) -> None:
    async with servers.fleet(servers.urls[:2]) as fleet:
        await break_off(servers, fleet, 1, "far-1")
    async with servers.fleet([*servers.urls[:2], servers.other(1, "127.0.0.1")]) as fleet:
        assert [row.status for row in await fleet.resume()] == ["ok", "skipped", "skipped"]
    assert "half loaded" not in servers.served


async def test_a_new_server_that_serves_is_not_suspected(servers: Servers) -> None:
    async with servers.fleet(servers.urls[:2]) as fleet:
        await break_off(servers, fleet, 1, "far-1")
    async with servers.fleet([servers.urls[0], servers.urls[2]]) as fleet:
        await fleet.pause(PAUSE)
        assert [row.ok for row in await fleet.resume()] == [True, True]


async def test_a_server_that_left_and_returns_has_its_own_record(servers: Servers) -> None:
    async with servers.fleet(servers.urls) as fleet:
        await fleet.pause(Pause(mode="keep", clear_cache=False, servers=("far-0",)))
        await fleet.sleep(Sleep(servers=("far-1",)))
    async with servers.fleet(servers.urls[2:]) as fleet:
        assert [row.server for row in await fleet.resume()] == ["far-2"]
    async with servers.fleet(servers.urls[::-1]) as fleet:
        outcomes = {row.server: row for row in await fleet.resume()}
        assert list(outcomes) == ["far-2", "far-1", "far-0"]
        assert outcomes["far-0"].detail == "" and outcomes["far-1"].status == "skipped"


async def test_what_is_recorded_while_servers_are_observed_is_judged_by_its_own_record(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command records a server, and that a push left it half loaded."""
    async with servers.fleet(servers.urls[:1]) as fleet, servers.fleet(servers.urls[:2]) as other:
        await fleet.resume()

        async def observe(*arguments: Any) -> list[Observed]:
            found = await observation.observe(*arguments)
            await break_off(servers, other, 1, "far-1")
            return found

        monkeypatch.setattr(attached_recovery, "observe", observe)
        found = {row.server: row.condition for row in await fleet.findings()}
        assert found == {"far-0": "healthy", "far-1": "unreachable"}


async def test_a_router_may_spell_the_url_of_a_server_otherwise(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = [f"{url.upper().replace('HTTP', 'http')}:80" for url in servers.urls[:2]]

    class Router:
        async def workers(self) -> list[str]:
            return list(workers)

        async def remove_worker(self, url: str) -> None:
            workers.remove(url)

    monkeypatch.setattr("skyctl.engines.router", lambda *_, **__: Router())
    async with servers.fleet(servers.urls[:2]) as fleet:
        ref, router = fleet.ref, {"router": "http://router:9000"}
        config = ref.config.model_copy(update=router)
        fleet.ref = FleetRef(ref.name, ref.paths, config, ref.base_dir, None)
        assert [row.routed for row in (await fleet.status()).replicas] == [True, True]
        await fleet.resume()
        servers.stubs[1].engine.dead = True
        await fleet.recover()
        assert workers == ["http://STUB-0:80"]


async def test_weights_of_another_label_are_not_saved_as_the_fleets(
    servers: Servers, tmp_path: Path
) -> None:
    """Those of a server that was started again, or to which another fleet has pushed."""
    engine = servers.stubs[0].engine
    engine.contents = rows.of_checkpoint(engine.model)
    async with servers.fleet(servers.urls[:1]) as fleet:
        await fleet.resume()
        fleet.state.set_weights(FleetWeights("v1"))
        fleet.state.update_server("far-0", weight_version="v1")  # pushed with --no-verify
        with pytest.raises(PreflightError, match="says that it holds default"):
            await fleet.save_weights(SaveWeights(str(tmp_path / "saved")))
        engine.weight_version = "v1"
        await engine.sleep(1, "abort")  # by another program
        with pytest.raises(PreflightError, match="far-0 is asleep"):
            await fleet.save_weights(SaveWeights(str(tmp_path / "saved")))
        await engine.wake([])
        assert (await fleet.save_weights(SaveWeights(str(tmp_path / "saved")))).version == "v1"
