"""A conversation with the agent of another machine: JSON lines over the pipes of one process: ssh,
srun, or what talks to Ray (`ray/client.py`).

The agent speaks first, `{"agent": protocol, "skyctl": version}`; only then is anything sent to it.
What is secret goes through the pipe, never on a command line or into the environment of that
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from skyctl import __version__
from skyctl.children import started
from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.launch.base import A_GPU, Node, RayCluster
from skyctl.store.owned import own_stdin
from skyctl.store.paths import state_root

PROTOCOL = 1
"""Of the agent. Count it up when a tether that runs could not talk to a new agent any more."""
MACHINE = "{host}"
"""Stands for the machine in a client's command line, which otherwise ends with it."""
CONNECT_TIMEOUT_S = 20.0
FACTS_TIMEOUT_S = 30.0
_RAY_TIMEOUT_S = 45.0
_LONGEST_LINE = 1024 * 1024
_LAST_WORDS = 4096
_CLOSE_S = 1.0
_LONGEST_REASON = 200
_SLURMS_LAST = re.compile(r"^srun: error: .*: Exited with exit code \d+$", re.MULTILINE)
_RAYS_LOG = re.compile(r"^\[\d.*?\] \S+: ")
_MODULE = "skyctl.launch.remote.agent"
_CLIENT = "skyctl.launch.ray.client"
_RAYS_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_KEY_PROBLEMS = ("Host key verification failed", "HOST IDENTIFICATION HAS CHANGED")


class Session:
    """One connection to one machine, for an `async with`: entered, its agent answers.

    Raises:
        HostUnreachable: the machine cannot be asked; one sentence says why.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._stderr = b""

    async def __aenter__(self) -> Session:
        node = self._node
        client, *arguments = command_on(node, [node.python, "-P", "-m", _MODULE])
        try:
            self._client = await started(
                asyncio.create_subprocess_exec(
                    *(client, *arguments),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env=connection_environment(),
                    limit=_LONGEST_LINE,
                )
            )
        except OSError as error:
            raise HostUnreachable(
                f"{client} cannot be started: {error.strerror}",
                hint="install it, or name another client with `ssh: {command: [...]}`",
            ) from error
        own_stdin(self._client)
        self._drain = asyncio.create_task(self._keep_last_words())
        try:
            await self._greet()
        except BaseException:
            await self._close()
            raise
        return self

    async def _greet(self) -> None:
        hello = await self.receive(connect_timeout_s(self._node))
        if hello.get("agent") != PROTOCOL:
            raise another_version(self._node, str(hello.get("skyctl")))
        self.version = str(hello["skyctl"])

    async def go_on(self, node: Node) -> None:
        """From a cluster to the agent of one of its nodes, in the same connection."""
        await self.send({"do": "relay", "target": node.target})
        self._node = node
        await self._greet()

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def send(self, message: dict[str, Any]) -> None:
        """Send one message."""
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # `receive` says why
            await self._client.stdin.drain()

    async def receive(self, timeout_s: float) -> dict[str, Any]:
        """The agent's next message.

        Raises:
            HostUnreachable: none within `timeout_s` seconds, or the connection ended.
            SkyctlError: the agent could not do what it was asked for.
        """
        assert self._client.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = b""
                while not line.startswith(b'{"'):  # what a login shell prints comes first
                    line = await self._client.stdout.readline()
                    if not line.endswith(b"\n"):  # the end, maybe in the middle of a message
                        await self._drain
                        raise explained(self._node, await self._client.wait(), self._stderr)
            message = json.loads(line)
        except TimeoutError as error:
            raise HostUnreachable(silence(self._node), hint=_by_hand(self._node)) from error
        except ValueError as error:  # a line that is too long, or no JSON
            garbled = f"{silence(self._node)} as its agent would"
            raise HostUnreachable(garbled, hint=_by_hand(self._node)) from error
        if "unreachable" in message:
            raise HostUnreachable(message["unreachable"], hint=message["hint"])
        if "error" in message:
            raise SkyctlError(f"{self._node.target}: {message['error']}")
        return dict(message)

    async def _keep_last_words(self) -> None:
        assert self._client.stderr is not None
        while data := await self._client.stderr.read(_LAST_WORDS):
            self._stderr = (self._stderr + data)[-_LAST_WORDS:]

    async def _close(self) -> None:
        assert self._client.stdin is not None
        self._drain.cancel()
        self._client.stdin.close()
        if self._client.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._client.kill()
        with contextlib.suppress(TimeoutError):  # what ssh left behind may hold its pipes
            async with asyncio.timeout(_CLOSE_S):
                await self._client.wait()
                return
        # else Python does it once the event loop is closed, with a traceback in the server's log
        self._client._transport.close()  # type: ignore[attr-defined]


async def ask(node: Node, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """One question, one answer, in a connection of its own. Raises as `Session.hear`."""
    async with Session(node) as session:
        await session.send(request)
        return {"skyctl": session.version, **await session.receive(timeout_s)}


def another_version(node: Node, theirs: str) -> HostUnreachable:
    """The error of a machine whose skyctl is not ours."""
    return HostUnreachable(
        f"{node.target} has skyctl {theirs} in {node.python}, and this machine {__version__}",
        hint="install the same version there",
    )


def connect_timeout_s(node: Node) -> float:
    """How long an agent may take to answer first. Ray alone takes seconds to import."""
    return _RAY_TIMEOUT_S if node.ray else CONNECT_TIMEOUT_S


def silence(node: Node) -> str:
    """What a machine that says nothing is to its user."""
    return f"{node.target} does not answer" + (f" over {_way(node)}" if node.chosen else "")


def _way(node: Node) -> str:
    """The client, by its name to the user."""
    if node.ray:
        return "Ray"
    return Path(node.command[0]).name if _names_machine(node.command) else "ssh"


def _names_machine(command: Sequence[str]) -> bool:
    return any(MACHINE in word for word in command)


def _client(node: Node) -> list[str]:
    """The command line that runs a line of shell on a machine, without that line."""
    if _names_machine(node.command):
        return [word.replace(MACHINE, node.target) for word in node.command]
    return [*node.command, node.target]


def command_on(node: Node, argv: Sequence[str]) -> list[str]:
    """The program here whose pipes are those of `argv` on a node; it ends with it."""
    remote = shlex.join(argv)
    if node.ray is None:
        return [*_client(node), remote]
    cluster = json.dumps(asdict(node.ray))
    target = node.target if node.chosen or node.target == A_GPU else ""
    client = [sys.executable, "-P", "-m", _CLIENT, _driver_of(node.ray), str(os.getpid())]
    return [*client, cluster, target, remote]


def _driver_of(cluster: RayCluster) -> str:
    """The name of the driver for this connection: shared by all processes that connect alike."""
    token, path = (os.environ.get(name, "") for name in _RAYS_TOKEN)
    ours = [str(state_root()), sys.executable, cluster.address, cluster.allow_unauthenticated, path]
    digest = hashlib.sha256(json.dumps(ours).encode()).digest()[:16]
    if token:
        digest = _slowly_hashed(token, digest)
    return f"skyctl-ray-{os.getuid()}-{digest.hex()}"


@cache
def _slowly_hashed(secret: str, salt: bytes) -> bytes:
    """Others see the name: it must cost too much to try tokens on it."""
    return hashlib.scrypt(secret.encode(), salt=salt, n=1 << 14, r=8, p=1, dklen=16)


def connection_environment() -> dict[str, str]:
    """Of that program: nothing that is secret."""
    return {k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")}


def _by_hand(node: Node) -> str:
    if node.ray:
        return "look at the cluster: ray status"
    by_hand = [*_client(node), "hostname"] if _names_machine(node.command) else ["ssh", node.target]
    return f"try it by hand: {shlex.join(by_hand)}"


def explained(node: Node, code: int, stderr: bytes) -> HostUnreachable:
    """Why the connection, or what it ran, ended before it said anything."""
    text = _SLURMS_LAST.sub("", stderr.decode(errors="replace")).strip()
    way = _way(node)
    last = text.rpartition("\n")[2].strip() or f"{way} exited with code {code}"
    last = _RAYS_LOG.sub("", last)[:_LONGEST_REASON]
    target, python = node.target, node.python
    section = "ray" if node.ray else "ssh"
    if any(problem in text for problem in _KEY_PROBLEMS):
        return HostUnreachable(
            f"{target}: its host key is not known here, or has changed",
            hint=f"look at it once by hand: ssh {target}",
        )
    if "Permission denied" in text and code == 255:
        return HostUnreachable(
            f"{target} does not let us in without a password",
            hint=f"give it your public key: ssh-copy-id {target}",
        )
    if "No module named" in last:
        return HostUnreachable(
            f"{target}: {python} has no skyctl",
            hint=f"install skyctl {__version__} there, or correct `{section}: {{python: ...}}`",
        )
    if code in (126, 127):
        return HostUnreachable(
            f"{target} has no Python at {python}", hint=f"correct `{section}: {{python: ...}}`"
        )
    return HostUnreachable(f"{target} cannot be asked over {way}: {last}", hint=_by_hand(node))
