"""A fleet through its supervisor's HTTP API: every verb is one request (`supervisor/api.py`).

Over the socket in the fleet's directory, or over TCP to another machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import quote, urlsplit

from skyctl.core.arbiter import own_command
from skyctl.core.service import FleetService
from skyctl.core.verb_table import Q, R, Verb
from skyctl.errors import (
    DeadlineExceeded,
    FleetDownError,
    ServerError,
    SkyctlError,
    UsageError,
    error_named,
)
from skyctl.http.connections import KeptConnections
from skyctl.http.transport import Answer, NoAnswer, Request, Transport, TransportError
from skyctl.store.credentials import read_secret
from skyctl.store.identity import peer
from skyctl.store.paths import FleetPaths
from skyctl.store.stopped import is_stopped
from skyctl.supervisor.wire import (
    CALLER_HEADER,
    VERSION_HEADER,
    own_version,
    reader,
    stamp,
    version_mismatch,
)

if TYPE_CHECKING:
    from skyctl.adapters.fleet import AdapterChange
    from skyctl.adapters.requests import LoadAdapter
    from skyctl.core.following import JobChanges
    from skyctl.core.registry import RemoteRef
    from skyctl.core.requests import JobQuery, OpenedUpdate, OpenUpdate, Staging
    from skyctl.push.request import PushRequest

LOOK = "look: skyctl logs supervisor"
_STOPPED_S = 1.0
"""A supervisor that does not answer for so long may be stopped."""
_CONNECT_S = 5.0


class RemoteFleet(FleetService):
    """One fleet. Every call raises FleetDownError when no supervisor answers."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        *,
        url: str = "http://supervisor",
        headers: dict[str, str] | None = None,
        paths: FleetPaths | None = None,
    ) -> None:
        self.name = name
        self._paths = paths
        self._transport = transport
        self._url = f"{url}/v1"
        self._headers = headers or {}

    @classmethod
    def on_this_machine(cls, paths: FleetPaths) -> Self:
        """By the socket in the fleet's directory. Raises SkyctlError where that is not ours."""
        return cls(paths.name, by_socket(paths), paths=paths)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._transport.aclose()

    async def _ask(self, verb: Verb[Q, R], request: Q, result: type[R]) -> R:
        patience_s = verb.patience_s(request)
        headers = {
            VERSION_HEADER: own_version(),
            CALLER_HEADER: quote(own_command()),
            "content-type": "application/json",
            **self._headers,
        }
        sent = Request("POST", self._url, f"/{verb.name}", headers, self._encoded(request))
        read = reader(result)
        try:
            answer = await self._answer(sent, patience_s)
        except NoAnswer as error:
            raise DeadlineExceeded(
                f"the supervisor of fleet {self.name} did not answer in {patience_s:g} s",
                hint=LOOK,
            ) from error
        except TransportError as error:
            raise self._unreachable(error) from error
        if not answer.is_success:
            raise _error(answer)
        try:
            decoded = read(answer.body)
        except ValueError as error:
            theirs = answer.headers.get(VERSION_HEADER, "")
            if theirs and theirs != f"{own_version()}/{stamp()}":
                raise version_mismatch(theirs, own_version()) from error
            raise ServerError(
                f"the supervisor answered {answer.text[:100]!r}", hint=LOOK
            ) from error
        return decoded

    async def _answer(self, request: Request, patience_s: float) -> Answer:
        """The answer of the supervisor.

        Raises:
            FleetDownError: it is stopped, here: it will not answer. NoAnswer, TransportError.
        """
        sending = asyncio.ensure_future(self._transport.send(request, timeout_s=patience_s))
        try:
            while self._paths is not None:
                done, _ = await asyncio.wait({sending}, timeout=_STOPPED_S)
                if not done and (pid := await asyncio.to_thread(stopped_supervisor, self._paths)):
                    raise stopped_error(self.name, pid)
                if done:
                    break
            return await sending
        finally:
            sending.cancel()

    def _encoded(self, request: object) -> bytes:
        return json.dumps({} if request is None else request, default=vars).encode()

    def _unreachable(self, error: TransportError) -> SkyctlError:
        from skyctl.core.recorded import down_error

        return down_error(self.name)


class NetworkFleet(RemoteFleet):
    """A fleet on another machine: every path in a request is a path there."""

    def __init__(self, ref: RemoteRef) -> None:
        token = None if ref.token_file is None else _copied(ref.token_file)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.host = urlsplit(ref.url).netloc
        transport = KeptConnections(tls=None if ref.ca is None else _trusting(ref.ca))
        super().__init__(ref.url, transport, url=ref.url, headers=headers)

    async def start_push(self, request: PushRequest) -> str:
        """Raises UsageError for a relative path, which would mean another directory there."""
        _refuse_local(request.checkpoint, self.host)
        return await super().start_push(request)

    async def open_update(self, request: OpenUpdate) -> OpenedUpdate:
        """Raises UsageError for a relative path, which would mean another directory there."""
        if request.push.checkpoint:
            _refuse_local(request.push.checkpoint, self.host)
        return await super().open_update(request)

    async def load_adapter(self, request: LoadAdapter) -> AdapterChange:
        """Raises UsageError for a relative path, which would mean another directory there."""
        if not Path(request.directory).is_absolute():
            raise UsageError(
                f"{request.directory} is relative, and the fleet is on {self.host}",
                hint=f"give the absolute path that it has on {self.host}",
            )
        return await super().load_adapter(request)

    async def job_changes(self, request: JobQuery) -> JobChanges:
        """A push's error says on which machine the checkpoint was sought."""
        changes = await super().job_changes(request)
        error = changes.job.error
        if error is None or error.get("kind") != "NotFoundError":
            return changes
        hint = f"it was sought on {self.host}, where paths of a push are"
        return replace(changes, job=replace(changes.job, error={**error, "hint": hint}))

    async def staging(self) -> Staging:
        raise UsageError(
            f"weights from memory are pushed on the fleet's own machine, {self.host}",
            hint="save a checkpoint where both machines see it, and push its path",
        )

    def _unreachable(self, error: TransportError) -> SkyctlError:
        if isinstance(error.__cause__, ssl.SSLCertVerificationError):  # waiting would not help
            return UsageError(
                f"the certificate of {self.name} is not trusted: {error}",
                hint="copy the fleet's supervisor.pem here, and give it with --ca",
            )
        how = "`supervisor: {listen: …}`?"
        if self.name.startswith("http:"):
            how = "`supervisor: {listen: …, tls: false}`? Without `tls: false` it is https://…"
        return FleetDownError(
            f"no supervisor answers at {self.name}: {error}",
            hint=f"is the fleet up, and does its file have {how}",
        )


def stopped_error(name: str, pid: int) -> FleetDownError:
    """The error of every verb while the fleet's supervisor is stopped."""
    return FleetDownError(
        f"the supervisor of fleet {name} (pid {pid}) is stopped",
        hint=f"let it go on: kill -CONT {pid}; or replace it, its servers go on: skyctl recover",
        details={"stopped": pid},
    )


def stopped_supervisor(paths: FleetPaths) -> int:
    """The pid of the fleet's supervisor if that is stopped; else 0."""
    with contextlib.suppress(OSError, SkyctlError):
        pid = listening(paths)
        return pid if is_stopped(pid) else 0
    return 0


def listening(paths: FleetPaths) -> int:
    """The pid that listens at the fleet's socket, from the kernel. Raises OSError if none does.

    Raises:
        SkyctlError: it has none here, because it runs in another container.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_S)
        connection.connect(str(paths.socket))
        pid, _ = peer(connection)
    if pid <= 0:  # as a target of kill, 0 would be our own process group
        raise SkyctlError(
            f"the supervisor of fleet {paths.name} runs in another container",
            hint="type the same there, with the skyctl that is to take its place",
        )
    return pid


def by_socket(paths: FleetPaths) -> Transport:
    """The way to the supervisor of this machine. Raises SkyctlError where that is not ours."""
    paths.refuse_foreign()
    return KeptConnections(unix_socket=str(paths.socket))


def _error(answer: Answer) -> SkyctlError:
    """The error of our tree that the supervisor named."""
    try:
        shown = json.loads(answer.body)["error"]
        return error_named(
            str(shown["kind"]),
            str(shown["message"]) or f"the supervisor answered {answer.status}",
            hint=str(shown["hint"]),
            details=dict(shown["details"]),
        )
    except (ValueError, LookupError, TypeError, RecursionError):
        theirs = answer.headers.get(VERSION_HEADER, "")
        if theirs != f"{own_version()}/{stamp()}":
            return version_mismatch(theirs, own_version())
        return ServerError(
            f"the supervisor answered {answer.status}", status=answer.status, hint=LOOK
        )


def _copied(file: Path) -> str:
    """The token in a copy of its file. Raises UsageError."""
    try:
        token = read_secret(file)
    except SkyctlError as error:  # what it advises is for the file of a fleet here
        raise UsageError(
            f"--token-file {error.message}",
            hint="copy the fleet's supervisor.token into a file of yours with mode 0600",
        ) from error
    if token is None:
        raise UsageError(f"--token-file {file} does not exist")
    return token


def _refuse_local(checkpoint: str, host: str) -> None:
    path = Path(checkpoint)
    if path.exists() and not path.is_absolute():
        raise UsageError(
            f"{checkpoint} is a directory of this machine, and the fleet is on {host}",
            hint=f"copy it there, and give its absolute path on {host}",
        )


def _trusting(ca: Path) -> ssl.SSLContext:
    """Raises UsageError for a file that is not a certificate."""
    try:
        return ssl.create_default_context(cafile=str(ca))
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"--ca {ca}: {error}") from error
