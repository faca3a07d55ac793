"""What servers are asked before a push, and what is remembered of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.engines.base import StartedWith
from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import PreflightError
from skyctl.push import server_facts
from skyctl.push.request import Reading
from skyctl.push.server_facts import ask_servers, refuse_without_nccl
from tests.unit.push.fleets import Stubs


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_facts, "_makes", {})


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path, count=1)


def made_of(stubs: Stubs, instance: str, backend: str = "skyctl") -> None:
    server = replace(stubs.fleet.servers[0], instance=instance, backend=backend)
    stubs.fleet = replace(stubs.fleet, servers=(server,))


async def asked_twice(stubs: Stubs, first: str, second: str) -> int:
    """How often the server was asked for its configuration."""
    async with stubs.client() as client:
        for instance in (first, second):
            made_of(stubs, instance)
            facts = await ask_servers(stubs.fleet, client=client)
            assert facts[0].process.vllm_version
    return stubs.servers[0].asgi.calls["/version"]


async def test_the_same_process_is_asked_for_its_configuration_once(stubs: Stubs) -> None:
    assert await asked_twice(stubs, "41@1.5", "41@1.5") == 1


async def test_a_restarted_or_unknown_process_is_asked_again(stubs: Stubs) -> None:
    assert await asked_twice(stubs, "41@1.5", "42@9.5") == 2
    assert await asked_twice(stubs, "", "") == 4


async def test_a_fleet_that_now_has_one_reader_asks_known_servers_for_their_nccl_settings(
    stubs: Stubs,
) -> None:
    made_of(stubs, "41@1.5")
    stubs.engines[0].nccl_settings = {"NCCL_SOCKET_IFNAME": "eth1"}
    async with stubs.client() as client:
        assert (await ask_servers(stubs.fleet, client=client))[0].process.nccl_settings is None
        (fact,) = await ask_servers(
            replace(stubs.fleet, reading=Reading(one_reader=True)), client=client
        )
    assert fact.process.nccl_settings == {"NCCL_SOCKET_IFNAME": "eth1"}


async def test_whether_it_is_paused_is_asked_each_time(stubs: Stubs) -> None:
    made_of(stubs, "41@1.5")
    async with stubs.client() as client:
        assert not (await ask_servers(stubs.fleet, client=client))[0].paused
        await client.call(stubs.fleet.servers[0].target, "POST", "/pause", timeout_s=5)
        assert (await ask_servers(stubs.fleet, client=client))[0].paused


async def test_a_server_whose_nccl_is_off_is_refused_for_nccl(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def started_with(server: VLLMServer) -> StartedWith:
        return StartedWith(backend="nccl")

    monkeypatch.setattr(VLLMServer, "started_with", started_with)
    made_of(stubs, "41@1.5", backend="nccl")
    stubs.engines[0].nccl_problem = "vLLM cannot use NCCL: undefined symbol ncclCommSuspend"
    stubs.engines[0].nccl_settings = {"NCCL_PROTO": "Simple"}
    async with stubs.client() as client:
        facts = await ask_servers(stubs.fleet, client=client)
    assert [fact.process.nccl_settings for fact in facts] == [{"NCCL_PROTO": "Simple"}]
    with pytest.raises(PreflightError, match="ncclCommSuspend"):
        refuse_without_nccl(facts)
