"""What comes straight from a trainer: weights and LoRA adapters, written from its memory and then
pushed or loaded; and weights sent by its own engine while the fleet is frozen (an update).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.adapters.fleet import AdapterChange
from skyctl.adapters.given import CANNOT_TAKE, MAY_PASS
from skyctl.adapters.requests import LoadAdapter, SentTensors, UnloadAdapter
from skyctl.checkpoints.live import NamedTensors, each_tensor, in_thread, running_model
from skyctl.checkpoints.staging import staged, sweep
from skyctl.children import to_its_end
from skyctl.core.requests import CloseUpdate, OpenUpdate, Staging
from skyctl.core.results import push_result
from skyctl.core.service import FleetService
from skyctl.core.urls import control_token
from skyctl.engines.inside.guard import HOLDER_HEADER
from skyctl.errors import PreflightError
from skyctl.live.file import write_tensors
from skyctl.live.model import dtype_name
from skyctl.push.request import PushRequest, PushResult
from skyctl.push.trainer import SendTarget, suggest
from skyctl.store.adapters import AdapterVersion
from skyctl.store.identity import own_identity
from skyctl.store.journal import Job, JobEvent
from skyctl.store.paths import expanded

if TYPE_CHECKING:
    from skyctl.adapters.tensors import GatherBuffer
    from skyctl.api.session import SessionHolder


async def push_tensors(
    fleet: FleetService,
    tensors: NamedTensors,
    request: PushRequest,
    *,
    dtype: object = None,
    on_event: Callable[[JobEvent], None] = lambda event: None,
    timeout_s: float | None = None,
) -> Job:
    """Push named tensors; returns the ended job. `request.checkpoint` is filled in here.

    They are written to a private directory first, which holds them until the fleet has others, so
    that a replica that restarts gets them too. `timeout_s` bounds the wait for the push itself.

    Raises:
        PreflightError, UsageError: the tensors are not the model's; nothing was touched.
        ConflictError: another push is in progress.
        DeadlineExceeded: it has not ended after `timeout_s` seconds; it goes on.
    """
    target_dtype = dtype_name(dtype)
    running = await asyncio.to_thread(running_model, await fleet.model_path())
    place = await swept(fleet)  # make room first
    try:
        with staged(
            place.directory, needed_bytes=running.total_bytes, in_memory=place.in_memory
        ) as checkpoint:
            await write_tensors(tensors, checkpoint, running=running, dtype=target_dtype)
            job_id = await fleet.start_push(replace(request, checkpoint=str(checkpoint)))
            return await fleet.wait_job(job_id, on_event, timeout_s)
    finally:
        await swept(fleet)


async def swept(fleet: FleetService) -> Staging:
    """Where weights are staged, after a sweep of files that no version needs."""
    staging = await fleet.staging()
    await asyncio.to_thread(sweep, staging.directory, staging.needed)
    return staging


@dataclass
class Update:
    """Servers that are frozen and wait for the weights `version`."""

    version: str
    """The label of the weights that are to be sent."""
    job: str
    """The id of the update, as `skyctl jobs` shows it."""
    servers: tuple[SendTarget, ...]
    """Each server, with its ranks in the trainer's group."""
    headers: dict[str, str] = field(repr=False)
    """HTTP headers that every call to these servers needs: they say whose freeze it is."""
    master_address: str
    """Where the trainer listens as rank 0."""
    master_port: int
    """The port that it listens on."""
    result: PushResult | None = None
    """The outcome; None until the block has been left."""

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
    """`Fleet.update`, for a connected fleet."""
    urls = await fleet.urls()
    at, token = suggest(urls.servers.values()), control_token(urls.access)
    opened = await fleet.open_update(OpenUpdate(request, at, own_identity(), timeout_s))

    async def ended(failure: str = "") -> PushResult:
        # servers are frozen, and wait for this
        await to_its_end(fleet.close_update(CloseUpdate(opened.job, failure)))
        return push_result(await fleet.wait_job(opened.job, on_event))

    if not opened.servers:
        await ended()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if opened.holder:
        headers[HOLDER_HEADER] = opened.holder
    update = Update(
        request.weight_version or "",
        opened.job,
        opened.servers,
        headers,
        at.master_address,
        at.master_port,
    )
    try:
        yield update
    except BaseException as error:
        try:
            await ended(f"the trainer failed: {error!r}")
        except Exception as cleanup_error:
            error.add_note(str(cleanup_error))
        raise
    update.result = await ended()


class Adapters:
    """The LoRA adapters of one fleet. Requests select them by name, as a model.

        await fleet.adapters.load("math", "./math-adapter")
        await fleet.adapters.sync("math", peft.get_peft_model_state_dict(model), config)

    A change is made on every server or on none. Nothing is paused: running requests finish with the
    version they began with, and answers say which that is (`"model": "math@2"`).
    """

    def __init__(self, fleet: SessionHolder) -> None:
        self._fleet = fleet

    async def list(self) -> tuple[AdapterVersion, ...]:
        """Every adapter, with its version, digest and the servers that have it."""
        async with self._fleet._connected() as fleet:
            return await fleet.adapters()

    async def load(
        self,
        name: str,
        source: str | PathLike[str] | NamedTensors,
        config: Mapping[str, Any] | None = None,
        *,
        any_base: bool = False,
        timeout_s: float | None = None,
    ) -> AdapterChange:
        """Serve an adapter under a new name.

        `source` is a directory that PEFT's save_pretrained wrote, or (name, tensor) pairs in PEFT's
        names: `base_model.model.<module>.lora_A.weight` [rank, in] and `.lora_B.weight` [out,
        rank]. With tensors, `config` holds the keys of adapter_config.json: at least `r` and
        `lora_alpha`. The fleet makes a copy, in memory if it fits: the source may change once this
        returns. `any_base` accepts an adapter that says it was trained on another model.

        Raises:
            NotFoundError, PreflightError, UsageError: refused; nothing was sent.
            ConflictError: the name is taken, there is no room, or another command acts on the
                fleet.
            PartialFailure, ServerError, DeadlineExceeded: a server failed; it was undone on all,
                and `details["outcomes"]` says what became of each.
        """
        return await self._serve(name, source, config, True, any_base, timeout_s)

    async def sync(
        self,
        name: str,
        source: str | PathLike[str] | NamedTensors,
        config: Mapping[str, Any] | None = None,
        *,
        create: bool = False,
        any_base: bool = False,
        timeout_s: float | None = None,
    ) -> AdapterChange:
        """Bring a name to its next version; with `create`, also one that is new. As `load`.

        Raises:
            NotFoundError: the name is new, and `create` is not set.
        """
        return await self._serve(
            name, source, config, None if create else False, any_base, timeout_s
        )

    async def unload(self, name: str, *, timeout_s: float | None = None) -> AdapterChange:
        """Stop serving an adapter; running requests end with it. Raises as `load`."""
        async with self._fleet._connected() as fleet:
            return await fleet.unload_adapter(UnloadAdapter(name=name, timeout_s=timeout_s))

    async def _serve(
        self,
        name: str,
        source: str | PathLike[str] | NamedTensors,
        config: Mapping[str, Any] | None,
        new: bool | None,
        any_base: bool,
        timeout_s: float | None,
    ) -> AdapterChange:
        def request(directory: Path, sent: SentTensors | None = None) -> LoadAdapter:
            return LoadAdapter(
                name=name,
                directory=str(expanded(directory).absolute()),
                new=new,
                any_base=any_base,
                sent=sent,
                timeout_s=timeout_s,
            )

        async with self._fleet._connected() as fleet:
            if isinstance(source, str | PathLike):
                return await fleet.load_adapter(request(Path(fspath(source))))
            from skyctl.adapters.tensors import gather, on_one_gpu, write_adapter

            named_tensors = [pair async for pair in each_tensor(source)]
            total = sum(tensor.nbytes for _, tensor in named_tensors if hasattr(tensor, "nbytes"))
            place = await fleet.staging()

            def room() -> AbstractContextManager[Path]:
                return staged(place.adapters, needed_bytes=total, in_memory=place.in_memory)

            notes: tuple[str, ...] = ()
            if on_one_gpu(named_tensors) and not self._fleet._sends_files:
                with room() as directory:
                    gathering = asyncio.to_thread(gather, named_tensors, config, directory)
                    sent, buffer = await to_its_end(gathering, undo=_freed)
                    try:
                        return await fleet.load_adapter(request(directory, sent))
                    except PreflightError as error:
                        if CANNOT_TAKE not in error.message:
                            raise
                        self._fleet._sends_files = MAY_PASS not in error.message
                        notes = (f"sent through a file: {error.message}",)
                    finally:
                        buffer.free()
            with room() as directory:
                sent = await in_thread(write_adapter, named_tensors, config, directory)
                change = await fleet.load_adapter(request(directory, sent))
                return replace(change, notes=change.notes + notes)


async def _freed(gathered: tuple[SentTensors, GatherBuffer]) -> None:
    gathered[1].free()
