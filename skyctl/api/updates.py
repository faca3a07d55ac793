"""An update: the fleet is frozen while a trainer sends its weights with an engine of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from skyctl.core.service import CloseUpdate, FleetService, OpenUpdate
from skyctl.core.urls import control_token
from skyctl.push.request import PushRequest, PushResult
from skyctl.push.trainer import SendTarget, suggest
from skyctl.service.ended import job_error
from skyctl.store.identity import own_identity
from skyctl.store.journal import JobEvent


@dataclass
class Update:
    """Servers that are frozen and wait for the weights `version`.

    `headers` go with every call to them. `result` is there once the block was left.
    """

    version: str
    job: str
    servers: tuple[SendTarget, ...]
    headers: dict[str, str] = field(repr=False)
    master_address: str
    master_port: int
    result: PushResult | None = None

    @property
    def world_size(self) -> int:
        """The sender and the workers of all servers."""
        return self.servers[0].world_size


@asynccontextmanager
async def updating(
    fleet: FleetService,
    request: PushRequest,
    *,
    on_event: Callable[[JobEvent], None],
    timeout_s: float | None,
) -> AsyncIterator[Update]:
    """`Fleet.update`, of a fleet that is connected."""
    urls = await fleet.urls()
    at, token = suggest(urls.servers.values()), control_token(urls.access)
    opened = await fleet.open_update(OpenUpdate(request, at, own_identity(), timeout_s))

    async def ended(failure: str = "") -> PushResult:
        await fleet.close_update(CloseUpdate(opened.job, failure))
        job = await fleet.wait_job(opened.job, on_event)
        if error := job_error(job):
            raise error
        assert job.result is not None  # it succeeded
        return PushResult.from_json(job.result)

    if not opened.servers:
        await ended()
    update = Update(
        request.weight_version or "",
        opened.job,
        opened.servers,
        {"Authorization": f"Bearer {token}"} if token else {},
        at.master_address,
        at.master_port,
    )
    try:
        yield update
    except BaseException as error:
        try:
            await ended(f"the trainer failed: {error!r}")
        except Exception as left:
            error.add_note(str(left))
        raise
    update.result = await ended()
