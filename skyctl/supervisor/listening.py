"""The supervisor's API for other machines: TCP with TLS and a token, off by default.

It offers only the verbs of a FleetService: a plan, which names programs to run, is accepted only
over the unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import ssl
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from skyctl.core.handlers import handlers
from skyctl.errors import SkyctlError
from skyctl.fleetfile.sections import SupervisorSection
from skyctl.http.listener import listen_at
from skyctl.store.credentials import ensure_secret, read_secret
from skyctl.store.paths import FleetPaths, expanded, place_private_file
from skyctl.supervisor.api import make_app

if TYPE_CHECKING:
    from skyctl.core.plan import FleetPlan
    from skyctl.supervisor.resident import Supervisor

_DAYS = 3650
_OPENSSL_TIMEOUT_S = 30.0
MOST_CONNECTIONS = 64
IDLE_S = 15.0
Settings = tuple[str, int, object]
"""Host, port, and whatever else a listener was opened with."""


@dataclass(frozen=True)
class Entrance:
    """Where other machines reach a fleet. They need copies of `token_file` and `cert` (None: plain
    HTTP on a loopback address), which every client is shown; `key` stays on this machine.
    """

    url: str
    token_file: Path
    cert: Path | None
    key: Path | None

    def fingerprint(self) -> str:
        """SHA-256 of the certificate, as `openssl x509 -fingerprint -sha256` prints it; "" without
        one.
        """
        if self.cert is None or not self.cert.exists():
            return ""
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.cert.read_text()))
        return ":".join(f"{byte:02X}" for byte in digest.digest())


def entrance(section: SupervisorSection, base_dir: Path, paths: FleetPaths) -> Entrance | None:
    """The entrance that a fleet file describes; None if it describes none."""
    if section.listen is None:
        return None

    def named(path: str | None, own: Path) -> Path:
        return base_dir / expanded(path) if path else own

    return Entrance(
        f"{'https' if section.tls else 'http'}://{section.listen}",
        named(section.token_file, paths.supervisor_token),
        named(section.tls_cert, paths.supervisor_cert) if section.tls else None,
        named(section.tls_key, paths.supervisor_key) if section.tls else None,
    )


class ListensAsPlanned(ABC):
    """Serves an app at one address, as the latest plan says; `Supervisor.not_listening` says why it
    does not.
    """

    title: str
    """What listens, in words."""
    most_connections = MOST_CONNECTIONS

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._as: object = None  # what it listens as; None: not at all
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    @abstractmethod
    def _settings(self, plan: FleetPlan) -> Settings | None:
        """The address, and all that it listens as; None if the plan has none."""

    @abstractmethod
    async def _config(self, plan: FleetPlan, options: dict[str, Any]) -> uvicorn.Config:
        """What it serves. Raises SkyctlError, OSError."""

    async def become(self, plan: FleetPlan) -> None:
        """Begin, end or change listening. A failure is reported in the fleet's status."""
        settings = self._settings(plan)
        async with self._turn:
            if self._as == settings:
                return
            await self.close()
            self._as = object()  # not as it should
            self._supervisor.unbound.pop(self.title, None)
            if settings is None:
                self._as = None
                return
            host, port, _ = settings
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            try:
                await self._open(plan, host, port)
            except (SkyctlError, OSError, ssl.SSLError, ValueError) as error:
                reason = error.message if isinstance(error, SkyctlError) else str(error)
                problem = f"{self.title} does not listen at {shown}: {reason}"
                self._supervisor.unbound[self.title] = problem
                self._supervisor.state.add_event("fleet", problem)
                return
            self._as = settings
            self._supervisor.state.add_event("fleet", f"{self.title} listens at {shown}")

    async def close(self) -> None:
        """Stop listening."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._server = self._serving = None

    async def _open(self, plan: FleetPlan, host: str, port: int) -> None:
        options = {
            "log_level": "warning",
            "access_log": False,
            "lifespan": "off",
            "ws": "none",  # which it would import
            "timeout_graceful_shutdown": 2,
            "http": ImpatientProtocol,
        }
        config = await self._config(plan, options)
        config.load()
        listener = BoundedListener(
            listen_at(host, port, backlog=self.most_connections), most=self.most_connections
        )
        self._server = QuietServer(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))


class Listening(ListensAsPlanned):
    """The supervisor's API for other machines."""

    title = "the supervisor"

    def _settings(self, plan: FleetPlan) -> Settings | None:
        section = plan.config.supervisor
        credentials = entrance(section, plan.base_dir, self._supervisor.paths)
        return (
            None if credentials is None else (*section.address, (section, _contents(credentials)))
        )

    async def _config(self, plan: FleetPlan, options: dict[str, Any]) -> uvicorn.Config:
        section = plan.config.supervisor
        credentials = entrance(section, plan.base_dir, self._supervisor.paths)
        assert credentials is not None  # it has settings
        if section.token_file is None:
            ensure_secret(credentials.token_file)
        token = read_secret(credentials.token_file)
        if token is None:
            raise SkyctlError(f"{credentials.token_file} does not exist")
        host, _ = section.address
        if (
            credentials.cert is not None
            and credentials.key is not None
            and section.tls_cert is None
        ):
            await asyncio.to_thread(ensure_certificate, credentials.cert, credentials.key, host)
        app = make_app(handlers(self._supervisor), ready=self._supervisor.readiness, token=token)
        return uvicorn.Config(
            app, ssl_certfile=credentials.cert, ssl_keyfile=credentials.key, **options
        )


class QuietServer(uvicorn.Server):
    """TERM and INT belong to the supervisor: they bring the fleet down first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _contents(credentials: Entrance | None) -> tuple[bytes, ...]:
    """Of its files: a token or certificate that was replaced must no longer be accepted."""
    files = (
        () if credentials is None else (credentials.token_file, credentials.cert, credentials.key)
    )
    return tuple(_digest(path) for path in files if path is not None)


def _digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return b""


def ensure_certificate(cert: Path, key: Path, host: str) -> None:
    """Make a self-signed certificate for every name and address of this machine, unless there is
    one.

    Raises:
        SkyctlError: openssl is missing, or failed.
    """
    if cert.exists() and key.exists():
        return
    names = {"localhost", socket.gethostname(), socket.getfqdn()}
    addresses = {
        entry.address.partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for entry in interface
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    (addresses if ":" in host or host[:1].isdigit() else names).add(host)
    subjects = [f"DNS:{name}" for name in sorted(names)]
    subjects += [f"IP:{address}" for address in sorted(addresses)]
    try:
        done = subprocess.run(
            [
                *("openssl", "req", "-x509", "-nodes", "-days", str(_DAYS)),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
                *("-subj", "/CN=skyctl supervisor"),
                *("-addext", f"subjectAltName={','.join(subjects)}", "-keyout", "-", "-out", "-"),
            ],
            capture_output=True,
            timeout=_OPENSSL_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SkyctlError(
            f"openssl could not make a certificate: {error}; name one of your own: "
            "supervisor.tls_cert and tls_key"
        ) from error
    middle = done.stdout.index(b"-----BEGIN CERTIFICATE-----")
    for path, content in ((key, done.stdout[:middle]), (cert, done.stdout[middle:])):
        path.unlink(missing_ok=True)
        place_private_file(path, content)


class BoundedListener(socket.socket):
    """Closes new connections at once while `most` are open, in a TLS handshake or after it.

    The supervisor's probes of servers need descriptors, too: if a stranger holds them all, servers
    look dead.
    """

    def __init__(self, listener: socket.socket, *, most: int = MOST_CONNECTIONS) -> None:
        super().__init__(fileno=listener.detach())
        self._most = most
        self._accepted: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises ConnectionAbortedError, after which asyncio waits for the next connection."""
        connection, address = super().accept()
        self._accepted = [accepted for accepted in self._accepted if accepted.fileno() >= 0]
        if len(self._accepted) >= self._most:
            connection.close()
            raise ConnectionAbortedError
        self._accepted.append(connection)
        return connection, address


class ImpatientProtocol(H11Protocol):
    """Closes a connection on which no complete request head arrives within `idle_s` seconds."""

    idle_s = IDLE_S
    _timer: asyncio.TimerHandle | None = None
    _before: object = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(self.idle_s, self._check_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _check_idle(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self._before:
            self.transport.close()
            return
        self._before = self.cycle
        self._timer = self.loop.call_later(self.idle_s, self._check_idle)
