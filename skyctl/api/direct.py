"""`Fleet.sync_weights` with tensors on a GPU: servers copy them where they can."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from skyctl.api.trainer import open_trainer
from skyctl.errors import PreflightError, SkyctlError
from skyctl.live.options import TrainerOptions
from skyctl.live.ranks import Hub
from skyctl.push.request import PushRequest, PushResult
from skyctl.states import LIVE
from skyctl.store.journal import JobEvent

if TYPE_CHECKING:
    from skyctl.api.session import SessionHolder


def is_direct(source: Any, request: PushRequest) -> bool:
    """Whether these are tensors on a GPU, pushed in a way that needs no file."""
    if request.transport == LIVE:
        return True
    if request.transport != "auto" or not isinstance(source, Mapping):
        return False
    plain = PushRequest("", weight_version=request.weight_version)
    needs_file = any(
        getattr(request, option) != getattr(plain, option)
        for option in (
            *("dry_run", "colocated", "sleep_after", "chunk_size", "stage_rate"),
            *("layout", "allow_unproven_reload", "allow_config", "draft"),
        )
    )
    on_gpu = any(getattr(tensor, "is_cuda", False) for tensor in source.values())
    return on_gpu and not needs_file and request.stage != "host"


async def push_direct(
    holder: SessionHolder,
    source: Any,
    request: PushRequest,
    *,
    dtype: object,
    on_event: Callable[[JobEvent], None],
    timeout_s: float | None,
) -> tuple[PushResult | None, str]:
    """The result, or why servers cannot copy; nothing was touched then.

    Raises:
        PreflightError: the request names this way, and servers cannot.
        SkyctlError: as `Fleet.sync_weights`.
    """
    try:
        trainer = await open_trainer(holder, Hub(), TrainerOptions(source, dtype=dtype))
    except SkyctlError as error:
        if request.transport == LIVE:
            raise
        return None, error.message
    async with trainer:
        if (plan := trainer.plan()).way != LIVE:
            if request.transport == LIVE:
                raise PreflightError(plan.reason, hint='transport="auto" takes a file where needed')
            return None, plan.reason
        result = await trainer.push(
            request.weight_version or "",
            pause_mode=request.pause_mode,
            verify=request.verify,
            scan_nan=request.scan_nan is not False,
            trial=request.trial,
            rolling=request.rolling,
            keep=request.keep,
            transport=request.transport,
            stage="auto" if request.stage == "host" else request.stage,
            on_event=on_event,
            timeout_s=timeout_s,
        )
    return result, ""
