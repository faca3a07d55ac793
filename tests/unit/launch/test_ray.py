"""What a Ray that cannot be used is to the user; no cluster takes part."""

from __future__ import annotations

import hashlib
import socket
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest

from skyctl.errors import HostUnreachable
from skyctl.launch.base import A_GPU, Node, RayCluster
from skyctl.launch.ray import connection
from skyctl.launch.ray.worker import environment
from skyctl.launch.remote.session import command_on

CLUSTER = RayCluster("127.0.0.1:9")


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "has no ray, which `launcher: ray` needs"),
        ("2.51.2", "has ray 2.51.2, and `launcher: ray` needs 2.52 to 2.x"),
        ("3.0.0", "has ray 3.0.0"),
    ],
)
def test_ray_is_there_in_a_version_that_asks_for_tokens(
    found: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(_: str) -> str:
        if found is None:
            raise PackageNotFoundError
        return found

    monkeypatch.setattr(connection, "version", version)
    with pytest.raises(HostUnreachable, match=message) as caught:
        connection.connect(CLUSTER)
    assert caught.value.hint


@pytest.mark.parametrize("blank", [False, True])
def test_without_a_token_nobody_is_asked(blank: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "version", lambda _: "2.60.0")
    if blank:
        monkeypatch.setenv("RAY_AUTH_TOKEN", " ")
    with pytest.raises(HostUnreachable, match="there is no token for the Ray cluster"):
        connection.connect(CLUSTER)


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "version", lambda _: "2.60.0")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t" * 32)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(HostUnreachable, match=f"no Ray cluster answers at {address}"):
            connection.connect(RayCluster(address))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("AuthenticationError: InvalidAuthToken"), "does not take our token"),
        (
            RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.55.0"),
            "has another Ray or Python than this machine: .*Ray: 2.55.0",
        ),
        (ConnectionError("gone"), "no Ray cluster answers at 127.0.0.1:9: gone"),
        (ValueError("\x1b[31mred\x1b[0m" + "!" * 999), "does not let us in: red!+…$"),
    ],
)
def test_an_error_of_rays_is_one_sentence(error: Exception, message: str) -> None:
    refused = connection._refusal(CLUSTER, error)
    with pytest.raises(HostUnreachable, match=message):
        raise refused
    assert "\n" not in refused.message and refused.hint


def test_a_server_inherits_nothing_that_is_rays() -> None:
    worker = {
        "PATH": "/bin",
        "RAY_AUTH_TOKEN_PATH": "/t",
        "RAY_JOB_ID": "1",
        "OMP_NUM_THREADS": "1",
    }
    assert environment(worker, "10.0.0.7") == {"PATH": "/bin", "SKYCTL_NODE_ADDRESS": "10.0.0.7"}


def test_a_command_runs_on_a_node_by_its_way_there() -> None:
    argv = ["env", "A=1 2", "python"]
    by_ssh = Node("me@far", "10.0.0.7", "python", ("ssh", "-F", "x"), 60.0)
    assert command_on(by_ssh, argv) == ["ssh", "-F", "x", "me@far", "env 'A=1 2' python"]
    by_srun = replace(by_ssh, target="n7", command=("srun", "--nodelist={host}", "sh", "-c"))
    assert command_on(by_srun, argv)[1:] == ["--nodelist=n7", "sh", "-c", "env 'A=1 2' python"]
    by_ray = Node("10.0.0.7", "10.0.0.7", "python", (), 60.0, CLUSTER)
    *driver, cluster, address, remote = command_on(by_ray, argv)
    assert driver[1:4] == ["-P", "-m", "skyctl.launch.ray.client"]
    assert ('"address": "127.0.0.1:9"' in cluster, address) == (True, "10.0.0.7")
    assert remote == "env 'A=1 2' python"
    *_, address, remote = command_on(by_ray.with_a_gpu, argv)
    assert (address, remote) == (A_GPU, "env 'A=1 2' python")
    *_, address, remote = command_on(by_ray.cluster, argv)
    assert address == ""


def test_whoever_has_another_token_has_another_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others see its name, which must not be what a quick hash makes of a token."""
    by_ray = Node("10.0.0.7", "10.0.0.7", "python", (), 60.0, CLUSTER)
    slow: list[bytes] = []
    scrypt = hashlib.scrypt

    def counted(password: bytes, **options: Any) -> bytes:
        slow.append(password)
        return scrypt(password, **options)

    monkeypatch.setattr(hashlib, "scrypt", counted)
    names = []
    for name, value in (("", ""), ("RAY_AUTH_TOKEN_PATH", "/t"), ("RAY_AUTH_TOKEN", "one")):
        with monkeypatch.context() as patched:
            for unset in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
                patched.delenv(unset, raising=False)
            if name:
                patched.setenv(name, value)
            names.append(command_on(by_ray, ["true"])[4])
    assert len(set(names)) == 3 and all(one.startswith("skyctl-ray-") for one in names)
    assert slow == [b"one"], "only a secret is worth the time"
