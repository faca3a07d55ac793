"""Which transport carries a push, and which wishes are refused."""

from __future__ import annotations

import pytest

from skyctl.errors import PreflightError
from skyctl.transfer.transports import Reachable, choose, load_transport


def server(backend: str, url: str = "http://127.0.0.1:8000", name: str = "demo-0") -> Reachable:
    return Reachable(name, url, backend)


@pytest.mark.parametrize(
    ("backend", "transport"),
    [("skyctl", "shm"), ("ipc", "ipc"), ("nccl", "nccl"), ("", "disk"), ("sparse_nccl", "disk")],
)
def test_auto_follows_the_servers_backend_and_says_why(backend: str, transport: str) -> None:
    choice = choose("auto", "auto", [server(backend), server(backend)])
    assert choice.name == transport
    assert choice.reason


def test_the_command_line_wins_over_the_fleet_file() -> None:
    servers = [server("skyctl")]
    assert choose("gloo", "disk", servers).name == "gloo"
    assert choose("auto", "disk", servers).name == "disk"


def test_servers_with_different_backends_are_named() -> None:
    with pytest.raises(PreflightError, match="a: skyctl, b: none"):
        choose("auto", "auto", [server("skyctl", name="a"), server("", name="b")])


@pytest.mark.parametrize("transport", ["shm", "gloo", "nccl", "ipc"])
def test_a_transport_the_servers_were_not_started_for_is_refused(transport: str) -> None:
    with pytest.raises(PreflightError, match="demo-0 has none") as caught:
        choose(transport, "auto", [server("")])
    assert f"transport: {transport}" in caught.value.hint


def test_a_server_on_another_machine_is_refused_for_shared_memory() -> None:
    with pytest.raises(PreflightError, match="works on one machine"):
        choose("shm", "auto", [server("skyctl", url="http://10.0.0.7:8000")])


@pytest.mark.parametrize("transport", ["shm", "ipc"])
def test_where_a_launcher_reaches_the_machines_each_has_a_sender(transport: str) -> None:
    servers = [server({"shm": "skyctl"}.get(transport, transport), url="http://10.0.0.7:8000")]
    choice = choose("auto", transport, servers, nodes=2)
    assert choice.reason == "set in the fleet file; a sender on each machine: 2"


@pytest.mark.parametrize(("transport", "backend"), [("gloo", "skyctl"), ("nccl", "nccl")])
def test_one_sender_broadcasts_to_all_machines_that_a_launcher_reaches(
    transport: str, backend: str
) -> None:
    servers = [server(backend, url="http://10.0.0.7:8000")]
    choice = choose(transport, "auto", servers, nodes=2)
    assert choice.reason == "asked for; one sender for all machines: 2"
    with pytest.raises(PreflightError, match="reaches other machines through a launcher only"):
        choose(transport, "auto", servers)


def test_disk_goes_anywhere() -> None:
    assert choose("disk", "auto", [server("", url="http://10.0.0.7:8000")]).name == "disk"


def test_a_transport_without_a_sender_is_refused() -> None:
    with pytest.raises(PreflightError, match="GPU sender"):
        load_transport("no_such_transport")
