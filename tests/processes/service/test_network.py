"""A fleet of another machine: TLS, a token, and what does not work from there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from pydantic import ValidationError

from skyctl.adapters.requests import LoadAdapter
from skyctl.core.registry import CA_VARIABLE, TOKEN_FILE_VARIABLE, RemoteRef, find, select
from skyctl.core.requests import OpenUpdate, Pause, Resume
from skyctl.errors import FleetDownError, NotFoundError, SkyctlError, UsageError
from skyctl.fleetfile.sections import SupervisorSection
from skyctl.launch.local.host import free_port
from skyctl.push.request import PushRequest
from skyctl.push.trainer import Rendezvous
from skyctl.service import connect
from skyctl.service.listing import list_fleets
from skyctl.supervisor.client import NetworkFleet
from skyctl.supervisor.interface import Reconcile, SupervisorClient
from skyctl.supervisor.listening import (
    BoundedListener,
    ImpatientProtocol,
    Listening,
    QuietServer,
    ensure_certificate,
    entrance,
)
from skyctl.supervisor.resident import Supervisor
from tests.processes.supervisor.supervising import bring_up, supervising
from tests.unit.supervisor.fleets import fleet_plan, stub_server

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class There:
    """A supervisor that listens, and what other machines have of it."""

    def __init__(self, supervisor: Supervisor, listening: Listening, port: int) -> None:
        self.supervisor, self.listening = supervisor, listening
        assert supervisor.plan is not None
        found = entrance(supervisor.plan.config.supervisor, Path(), supervisor.paths)
        assert found is not None
        self.entrance = found
        self.ref = RemoteRef(f"https://127.0.0.1:{port}", found.token_file, found.cert)


@pytest.fixture
async def there(tmp_path: Path) -> AsyncIterator[There]:
    async with supervising(tmp_path) as supervisor:
        port = free_port("127.0.0.1")
        plan = fleet_plan([stub_server("a")], supervisor={"listen": f"127.0.0.1:{port}"})
        await bring_up(supervisor, plan)
        listening = Listening(supervisor)
        await listening.become(plan)
        assert supervisor.not_listening == ""
        try:
            yield There(supervisor, listening, port)
        finally:
            await listening.close()


async def test_a_fleet_is_driven_from_another_machine(there: There) -> None:
    async with connect(there.ref) as fleet:
        assert (await fleet.status()).health == "healthy"
        [outcome] = await fleet.pause(Pause(mode="keep"))
        assert outcome.ok and there.supervisor.replicas["a"].state == "paused"
        await fleet.resume(Resume())
        assert list(await fleet.logs()) == ["a"]
        assert (await fleet.jobs(), (await fleet.urls()).name) == ((), "stubs")
        with pytest.raises(NotFoundError, match="no server 'z'"):
            await fleet.pause(Pause(servers=("z",)))


async def test_it_is_listed_there_with_why_it_does_not_answer(there: There) -> None:
    *_, line = await list_fleets(there.ref)
    assert (line.name, line.state, line.servers) == ("stubs", "healthy", 1)
    assert (line.url, line.file, line.reason) == (there.ref.url, None, None)
    *_, line = await list_fleets(replace(there.ref, token_file=None))
    assert (line.name, line.state) == (there.ref.url, "not answering")
    assert "asks for a token" in (line.reason or "")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"token_file": None}, "asks for a token"),
        ({"token": "0" * 64}, "does not know that token"),
        ({"ca": None}, r"the certificate of https://127.0.0.1:\d+ is not trusted"),
        ({"url": "http://127.0.0.1:{port}"}, "no supervisor answers at"),
    ],
)
async def test_who_lacks_something_is_told_so_in_one_sentence(
    there: There, tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    if wrong := change.pop("token", None):
        (tmp_path / "wrong").write_text(wrong)
        (tmp_path / "wrong").chmod(0o600)
        change["token_file"] = tmp_path / "wrong"
    if "url" in change:
        change["url"] = change["url"].format(port=there.ref.url.rpartition(":")[2])
    async with connect(replace(there.ref, **change)) as fleet:
        with pytest.raises(SkyctlError, match=match) as caught:
            await fleet.status()
    assert caught.value.hint and "\n" not in caught.value.message
    assert there.supervisor.replicas["a"].state == "ready"


async def test_no_plan_comes_from_another_machine(there: There) -> None:
    fleet = NetworkFleet(there.ref)
    outside = SupervisorClient("far", fleet._transport, url=there.ref.url, headers=fleet._headers)
    async with outside:
        with pytest.raises(NotFoundError, match="no verb 'reconcile'"):
            await outside.reconcile(Reconcile(fleet_plan([stub_server("b")])))
    assert list(there.supervisor.replicas) == ["a"]


async def test_paths_are_those_of_the_fleets_machine(
    there: There, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    async with connect(there.ref) as fleet:
        with pytest.raises(UsageError, match="runs is a directory of this machine"):
            await fleet.start_push(PushRequest("runs"))
        with pytest.raises(UsageError, match="runs is a directory of this machine"):
            await fleet.open_update(OpenUpdate(PushRequest("runs"), Rendezvous("127.0.0.1", 1)))
        with pytest.raises(UsageError, match="runs is relative, and the fleet is on 127"):
            await fleet.load_adapter(LoadAdapter(name="x", directory="runs"))
        with pytest.raises(UsageError, match="on the fleet's own machine"):
            await fleet.staging()
        job = await fleet.wait_job(await fleet.start_push(PushRequest("/not/there")), timeout_s=30)
        assert job.error is not None and "sought on 127.0.0.1" in job.error["hint"]


async def test_it_listens_as_the_latest_plan_says(there: There) -> None:
    taken = there.ref.url.removeprefix("https://")
    other = Listening(there.supervisor)
    plan = there.supervisor.plan
    assert plan is not None
    await other.become(plan)
    assert f"does not listen at {taken}: " in there.supervisor.not_listening
    reasons = [reason.message for reason in (await there.supervisor.status()).reasons]
    assert there.supervisor.not_listening in reasons
    nowhere = plan.config.model_copy(update={"supervisor": SupervisorSection()})
    await there.listening.become(replace(plan, config=nowhere))
    async with connect(there.ref) as fleet:
        with pytest.raises(FleetDownError, match="no supervisor answers"):
            await fleet.status()


async def test_another_up_listens_where_it_could_not(there: There) -> None:
    plan, other = there.supervisor.plan, Listening(there.supervisor)
    assert plan is not None
    await other.become(plan)
    assert there.supervisor.not_listening
    await there.listening.close()
    await other.become(plan)
    assert there.supervisor.not_listening == ""
    async with connect(there.ref) as fleet:
        assert (await fleet.status()).health == "healthy"
    await other.close()


async def test_a_token_that_was_replaced_is_not_taken_after_another_up(
    there: There, tmp_path: Path
) -> None:
    plan = there.supervisor.plan
    assert plan is not None and there.ref.token_file is not None
    old = tmp_path / "old"
    old.write_text(there.ref.token_file.read_text())
    old.chmod(0o600)
    there.ref.token_file.write_text("1" * 64)
    await there.listening.become(plan)
    async with connect(replace(there.ref, token_file=old)) as fleet:
        with pytest.raises(SkyctlError, match="does not know that token"):
            await fleet.status()
    async with connect(there.ref) as fleet:
        assert (await fleet.status()).health == "healthy"


async def test_strangers_hold_only_so_many_connections_and_not_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImpatientProtocol, "idle_s", 0.05)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    listener = BoundedListener(socket.create_server(("127.0.0.1", 0)), most=2)
    port = listener.getsockname()[1]
    server = QuietServer(uvicorn.Config(app, lifespan="off", http=ImpatientProtocol))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(10):
        silent = await asyncio.open_connection("127.0.0.1", port)
        half = await asyncio.open_connection("127.0.0.1", port)
        half[1].write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\n")
        third = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionError):
            assert await third[0].read() == b""
        assert await silent[0].read() == b""
        assert (await half[0].read()).startswith(b"HTTP/1.1 401")
        again = await asyncio.open_connection("127.0.0.1", port)
        again[1].write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await again[0].readline()).startswith(b"HTTP/1.1 401")
    for _, writer in (silent, half, third, again):
        writer.close()
    server.should_exit = True
    await serving


def test_a_certificate_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    cert, key = tmp_path / "c.pem", tmp_path / "k.pem"
    ensure_certificate(cert, key, "gpu7")
    made = cert.read_text()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert "PRIVATE" in key.read_text() and "PRIVATE" not in made
    ensure_certificate(cert, key, "gpu7")
    assert cert.read_text() == made


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"listen": "0.0.0.0:7420", "tls": False}, "could replace the weights"),
        ({"listen": "7420"}, "HOST:PORT"),
        ({"listen": "gpu7:99999"}, "HOST:PORT"),
        ({"listen": "gpu7:7420", "tls_cert": "c.pem"}, "go together"),
    ],
)
def test_what_the_fleet_file_must_not_say(section: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        SupervisorSection.model_validate(section)


def test_a_url_names_a_fleet_of_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_FILE_VARIABLE, str(tmp_path / "token"))
    monkeypatch.delenv(CA_VARIABLE, raising=False)
    assert find(None, "https://gpu7:7420/") == RemoteRef("https://gpu7:7420", tmp_path / "token")
    assert find(None, "http://127.0.0.1:7420").name == "http://127.0.0.1:7420"
    for wrong, match in (
        ("http://gpu7:7420", "unencrypted"),
        ("ftp://gpu7", "not the URL of a supervisor"),
        ("https://gpu7/x", "not the URL of a supervisor"),
    ):
        with pytest.raises(UsageError, match=match):
            find(None, wrong)
    with pytest.raises(UsageError, match="fleet's own machine"):
        select(None, "https://gpu7:7420")
    assert asyncio.run(_refuses_a_missing_token(tmp_path))


async def _refuses_a_missing_token(tmp_path: Path) -> bool:
    with pytest.raises(UsageError, match="does not exist"):
        NetworkFleet(RemoteRef("https://gpu7:7420", tmp_path / "absent"))
    (tmp_path / "copy").write_text("0" * 64)
    (tmp_path / "copy").chmod(0o644)
    with pytest.raises(UsageError, match="can be read by others") as caught:
        NetworkFleet(RemoteRef("https://gpu7:7420", tmp_path / "copy"))
    assert "mode 0600" in caught.value.hint, "and no fleet of this machine is to go down"
    return True
