"""Servers that are found anew by each verb."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.core.arbiter import Act
from skyctl.core.registry import FleetRef
from skyctl.core.requests import Pause, Resume, Sleep, Wake
from skyctl.errors import NotFoundError, SkyctlError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.http.client import ControlClient
from skyctl.push.request import PushRequest
from skyctl.service.attached import AttachedFleet
from skyctl.service.discovery import locate
from skyctl.store.in_doubt import InDoubt, put_in_doubt
from skyctl.store.paths import fleet_paths
from tests.stub.app import StubServer
from tests.stub.inprocess import StubTransport


def reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: Any, timeout_s: float = 30
) -> FleetRef:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    written = {"name": "far", "servers": servers, "control_timeout_s": timeout_s}
    config = FleetConfig.model_validate(written)
    return FleetRef("far", fleet_paths("far"), config, tmp_path, None)


async def test_a_command_names_servers_relative_to_the_fleet_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "http://10.0.0.3:8000/\n\npod-1 https://b.example/base\nhttp://[::1]:8000\n"
    (tmp_path / "servers.txt").write_text(lines)
    ref = reference(tmp_path, monkeypatch, {"command": "cat servers.txt"})
    assert await locate(ref) == (
        ("10-0-0-3-8000", "http://10.0.0.3:8000"),
        ("pod-1", "https://b.example/base"),
        ("1-8000", "http://[::1]:8000"),
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("true", "named none"),
        ("echo no such cluster >&2; exit 3", "exit code 3, no such cluster"),
        ("echo 10.0.0.3:8000", "'10.0.0.3:8000' is not a line of the form `URL` or `NAME URL`"),
        ("echo a http://x:1; echo a http://x:2", "more than one server named a"),
        ("echo a http://x:1; echo b http://x:1", "more than one server at http://x:1"),
        ("yes http://x:1 | head -n 5000", "5000 lines (at most 4096 servers)"),
        ("yes http://x:1 | head -n 200000", "it prints more than 1048576 bytes"),
        ("echo a http://x:99999", "Port out of range"),
        ("echo a http://me:key@x:1", "no user or password"),
        ("echo http://_", "'http://_' has no host"),
    ],
)
async def test_what_is_not_a_list_of_servers_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, expected: str
) -> None:
    with pytest.raises(SkyctlError, match=r"(?i)server") as raised:
        await locate(reference(tmp_path, monkeypatch, {"command": command}))
    assert expected in raised.value.message


@pytest.mark.parametrize("hangs", ["wait", "yes"])
async def test_a_command_that_hangs_ends_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str
) -> None:
    command = f"sleep 600 & echo $! > pid; {hangs}"
    ref = reference(tmp_path, monkeypatch, {"command": command}, timeout_s=0.5)
    with pytest.raises(SkyctlError, match=r"no answer in 0\.5 s"):
        await locate(ref)
    started = Path("/proc") / (tmp_path / "pid").read_text().strip()
    for _ in range(100):
        if not started.exists() or "\nState:\tZ" in (started / "status").read_text():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("what the command started is still running")


async def test_every_address_of_a_name_is_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolved(host: str, port: int, **_: Any) -> list[Any]:
        if host != "vllm.prod.svc":
            raise socket.gaierror(-2, "Name or service not known")
        found = ("10.0.0.9", "10.0.0.3", "fd00::3", "10.0.0.3")
        return [(None, None, 0, "", (address, port)) for address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    ref = reference(tmp_path, monkeypatch, {"dns": "vllm.prod.svc:8000"})
    assert [url for _, url in await locate(ref)] == [
        "http://10.0.0.3:8000",
        "http://10.0.0.9:8000",
        "http://[fd00::3]:8000",
    ]
    with pytest.raises(SkyctlError, match=r"vllm\.dev\.svc:8000: .*not known"):
        await locate(reference(tmp_path, monkeypatch, {"dns": "vllm.dev.svc:8000"}))


async def test_each_verb_asks_again_and_recovery_says_who_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = StubTransport([StubServer(), StubServer()])
    first, second = (target.url for target in transport.targets)
    listed = tmp_path / "servers.txt"
    listed.write_text(f"a {first}\nb {second}\n")
    ref = reference(tmp_path, monkeypatch, {"command": "cat servers.txt"})
    async with AttachedFleet(ref, client=ControlClient(transport=transport)) as fleet:
        paused = Pause(mode="keep", clear_cache=False)
        assert [one.server for one in await fleet.pause(paused)] == ["a", "b"]
        put_in_doubt(
            fleet.state, {"b": InDoubt("b", "push-1", "pause", half_updated=False, thaw=True)}
        )
        listed.write_text(f"a {first}\n")
        assert [one.server for one in await fleet.resume(Resume())] == ["a"]
        listed.write_text("not asked again so soon")
        assert [one.name for one in (await fleet.status()).replicas] == ["a"]
        listed.write_text(f"a {first}\n")
        found = {one.server: one for one in await fleet.recover()}
        assert found["a"].ok and not found["b"].ok
        assert f"not among the servers that were found ({second}); push-1" in found["b"].detail
        assert [one.server for one in await fleet.recover()] == ["a"]
        listed.write_text("")
        assert [row.name for row in (await fleet.weights()).servers] == ["a", "b"]
        listed.write_text(f"b {second}\n")  # it is back, as the push left it
        assert [(one.server, one.ok) for one in await fleet.recover()] == [("b", True)]
        assert [one.server for one in await fleet.resume(Resume())] == ["b"]
        listed.write_text("")
        with pytest.raises(NotFoundError, match="has no server"):
            await fleet.resume(Resume())


async def test_what_is_held_is_thawed_where_it_was_when_servers_cannot_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = [StubServer(), StubServer(), StubServer()]
    transport = StubTransport(stubs)
    lines = [
        f"{name} {target.url}\n" for name, target in zip("abc", transport.targets, strict=True)
    ]
    listed = tmp_path / "servers.txt"
    listed.write_text("".join(lines))
    ref = reference(tmp_path, monkeypatch, {"command": "cat servers.txt"})
    paused, why = Pause(mode="keep", clear_cache=False), "servers.txt: No such file"
    async with AttachedFleet(ref, client=ControlClient(transport=transport)) as fleet:
        await fleet.pause(replace(paused, servers=("a", "b")))
        await fleet.sleep(Sleep(servers=("c",)))
        listed.unlink()
        for verb in (fleet.pause(paused), fleet.sleep(Sleep())):
            with pytest.raises(SkyctlError, match=why):  # no more than that is touched
                await verb
    async with AttachedFleet(ref, client=ControlClient(transport=transport)) as fleet:
        (only,) = await fleet.resume(Resume(servers=("b",)))
        assert only.ok and only.server == "b" and why in only.detail
        assert [stub.engine.paused for stub in stubs[:2]] == [True, False]
        thawed = await fleet.resume(Resume())
        assert [(one.server, one.ok) for one in thawed] == [("a", True), ("c", False)]
        (woken,) = await fleet.wake(Wake())
        assert woken.ok and woken.server == "c" and why in woken.detail
        with pytest.raises(SkyctlError, match=why):  # nothing is held any more
            await fleet.resume(Resume())
        listed.write_text("".join(lines[:1]))
        await fleet.pause(paused)
        listed.write_text(lines[1])
        await fleet.pause(paused)  # a is gone, and is still held where it was
        listed.write_text("")
        assert [one.server for one in await fleet.resume(Resume())] == ["a", "b"]


async def test_recovery_looks_for_servers_when_it_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = StubTransport([StubServer(), StubServer()])
    first, second = (target.url for target in transport.targets)
    listed = tmp_path / "servers.txt"
    listed.write_text(f"a {first}\n")
    ref = reference(tmp_path, monkeypatch, {"command": "cat servers.txt"})
    async with AttachedFleet(ref, client=ControlClient(transport=transport)) as fleet:
        turn = await fleet.arbiter.turn(Act.PUSH, "a push")
        recovering = asyncio.create_task(fleet.recover())
        await asyncio.sleep(0.1)
        listed.write_text(f"a {first}\nb {second}\n")
        turn.release()
        assert [one.server for one in await recovering] == ["a", "b"]
        fleet.state.update_server("b", weight_version="v1")
        fleet.state.update_server("c", paused=True)
        listed.write_text(f"a {first}\n")
        await fleet.wait_job(await fleet.start_push(PushRequest("/none")), timeout_s=30)
        # of one that is gone only what it is meant to be is remembered
        assert [row.name for row in fleet.state.servers() if row.name != "a"] == ["c"]
