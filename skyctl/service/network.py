"""A fleet on another machine, by its supervisor's API over TCP."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from skyctl.core.following import JobChanges
from skyctl.core.registry import RemoteRef
from skyctl.core.service import JobQuery, OpenedUpdate, OpenUpdate, Staging
from skyctl.errors import FleetDownError, UsageError
from skyctl.http.connections import KeptConnections
from skyctl.http.transport import Transport, TransportError
from skyctl.push.request import PushRequest
from skyctl.store.credentials import read_secret
from skyctl.supervisor.client import RemoteFleet

if TYPE_CHECKING:
    from skyctl.adapters import AdapterChange, LoadAdapter


class NetworkFleet(RemoteFleet):
    """Every path in a request is a path on the fleet's machine."""

    def __init__(self, ref: RemoteRef, *, transport: Transport | None = None) -> None:
        token = None
        if ref.token_file is not None and (token := read_secret(ref.token_file)) is None:
            raise UsageError(f"--token-file {ref.token_file} does not exist")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self.host = urlsplit(ref.url).netloc
        if transport is None:
            transport = KeptConnections(tls=None if ref.ca is None else _trusting(ref.ca))
        super().__init__(ref.url, transport, url=ref.url, headers=headers)

    async def start_push(self, asked: PushRequest) -> str:
        """Raises UsageError for a relative path, which would mean another directory there."""
        _refuse_local(asked.checkpoint, self.host)
        return await super().start_push(asked)

    async def open_update(self, asked: OpenUpdate) -> OpenedUpdate:
        """Raises UsageError for a relative path, which would mean another directory there."""
        if asked.push.checkpoint:
            _refuse_local(asked.push.checkpoint, self.host)
        return await super().open_update(asked)

    async def load_adapter(self, asked: LoadAdapter) -> AdapterChange:
        """Raises UsageError for a relative path, which would mean another directory there."""
        if not Path(asked.directory).is_absolute():
            raise UsageError(
                f"{asked.directory} is relative, and the fleet is on {self.host}",
                hint=f"give the absolute path that it has on {self.host}",
            )
        return await super().load_adapter(asked)

    async def job_changes(self, asked: JobQuery) -> JobChanges:
        """A push's error says on which machine the checkpoint was looked for."""
        found = await super().job_changes(asked)
        error = found.job.error
        if error is None or error.get("kind") != "NotFoundError":
            return found
        hint = f"it was looked for on {self.host}, where paths of a push are"
        return replace(found, job=replace(found.job, error={**error, "hint": hint}))

    async def staging(self) -> Staging:
        raise UsageError(
            f"weights from memory are pushed on the fleet's own machine, {self.host}",
            hint="save a checkpoint where both machines see it, and push its path",
        )

    def _unreachable(self, error: TransportError) -> FleetDownError:
        return FleetDownError(
            f"no supervisor answers at {self.name}: {error}",
            hint="is the fleet up, does its file have `supervisor: {listen: …}`, and is its "
            "certificate given with --ca?",
        )


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
