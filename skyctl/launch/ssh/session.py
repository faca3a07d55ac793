"""A conversation with the agent of another machine: JSON lines over the pipes of one ssh.

The agent speaks first, `{"agent": protocol, "skyctl": version}`; only then is anything sent to it.
What is secret goes through the pipe, never on a command line or into the environment of ssh.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
from types import TracebackType
from typing import Any

from skyctl import __version__
from skyctl.errors import HostUnreachable, SkyctlError
from skyctl.launch.base import Node

PROTOCOL = 1
"""Of the agent. Count it up when a tether that runs could not talk to a new agent any more."""
CONNECT_TIMEOUT_S = 20.0
_LONGEST_LINE = 1024 * 1024
_LAST_WORDS = 4096
_CLOSE_S = 1.0
_KEY_PROBLEMS = ("Host key verification failed", "HOST IDENTIFICATION HAS CHANGED")


class Session:
    """One ssh to one machine, for an `async with`: entered, its agent answers.

    Raises:
        HostUnreachable: the machine cannot be asked; one sentence says why.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._stderr = b""

    async def __aenter__(self) -> Session:
        node = self._node
        there = shlex.join([node.python, "-P", "-m", "skyctl.launch.ssh.agent"])
        try:
            self._ssh = await asyncio.create_subprocess_exec(
                *(*node.command, node.target, there),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")},
                limit=_LONGEST_LINE,
            )
        except OSError as error:
            raise HostUnreachable(
                f"{node.command[0]} cannot be started: {error.strerror}",
                hint="install an ssh client, or name one with `ssh: {command: [...]}`",
            ) from error
        self._drain = asyncio.create_task(self._keep_last_words())
        try:
            hello = await self.hear(CONNECT_TIMEOUT_S)
            if hello.get("agent") != PROTOCOL:
                raise another_version(node, str(hello.get("skyctl")))
        except BaseException:
            await self._close()
            raise
        self.version = str(hello["skyctl"])
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close()

    async def say(self, message: dict[str, Any]) -> None:
        """Send one message."""
        assert self._ssh.stdin is not None
        self._ssh.stdin.write(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # `hear` says why
            await self._ssh.stdin.drain()

    async def hear(self, timeout_s: float) -> dict[str, Any]:
        """The agent's next message.

        Raises:
            HostUnreachable: none within `timeout_s` seconds, or the connection ended.
            SkyctlError: the agent could not do what it was asked for.
        """
        assert self._ssh.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = b""
                while not line.startswith(b'{"'):  # what a login shell prints comes first
                    line = await self._ssh.stdout.readline()
                    if not line.endswith(b"\n"):  # the end, maybe in the middle of a message
                        await self._drain
                        raise _explained(self._node, await self._ssh.wait(), self._stderr)
            message = json.loads(line)
        except TimeoutError as error:
            silent = f"{self._node.target} does not answer over ssh"
            raise HostUnreachable(silent, hint=_by_hand(self._node)) from error
        except ValueError as error:  # a line that is too long, or no JSON
            garbled = f"{self._node.target} does not answer over ssh as its agent would"
            raise HostUnreachable(garbled, hint=_by_hand(self._node)) from error
        if "error" in message:
            raise SkyctlError(f"{self._node.target}: {message['error']}")
        return dict(message)

    async def _keep_last_words(self) -> None:
        assert self._ssh.stderr is not None
        while data := await self._ssh.stderr.read(_LAST_WORDS):
            self._stderr = (self._stderr + data)[-_LAST_WORDS:]

    async def _close(self) -> None:
        assert self._ssh.stdin is not None
        self._drain.cancel()
        self._ssh.stdin.close()
        if self._ssh.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._ssh.kill()
        with contextlib.suppress(TimeoutError):  # what ssh left behind may hold its pipes
            async with asyncio.timeout(_CLOSE_S):
                await self._ssh.wait()


async def ask(node: Node, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """One question, one answer, in a connection of its own. Raises as `Session.hear`."""
    async with Session(node) as session:
        await session.say(request)
        return {"skyctl": session.version, **await session.hear(timeout_s)}


def another_version(node: Node, theirs: str) -> HostUnreachable:
    """The error of a machine whose skyctl is not ours."""
    return HostUnreachable(
        f"{node.target} has skyctl {theirs} in {node.python}, and this machine {__version__}",
        hint="install the same version there",
    )


def _by_hand(node: Node) -> str:
    return f"try it by hand: ssh {node.target}"


def _explained(node: Node, code: int, stderr: bytes) -> HostUnreachable:
    """Why ssh, or what it ran, ended before it said anything."""
    text = stderr.decode(errors="replace").strip()
    last = text.rpartition("\n")[2].strip() or f"ssh exited with code {code}"
    target, python = node.target, node.python
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
            hint=f"install skyctl {__version__} there, or correct `ssh: {{python: ...}}`",
        )
    if code in (126, 127):
        return HostUnreachable(
            f"{target} has no Python at {python}", hint="correct `ssh: {python: ...}`"
        )
    return HostUnreachable(f"{target} cannot be asked over ssh: {last}", hint=_by_hand(node))
