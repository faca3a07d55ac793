"""A push into a few servers at a time, while the others serve.

    check all ─► [drain, push, verify, trial, rejoin] ─► [ … ] ─► the fleet's version
                  └─ fails: this part is undone, the roll stops; those before it stay new

Requests are served throughout, by two versions: that is inherent. The fleet keeps its old version
until the last server has the new one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from skyctl.errors import PreflightError, PushError, SkyctlError
from skyctl.http.client import ControlClient
from skyctl.push.request import PushFleet, PushObserver, PushRequest, PushResult, PushServer
from skyctl.push.run import Rotation
from skyctl.push.transaction import push
from skyctl.transfer.sender_pool import SenderPool


async def push_rolling(
    request: PushRequest,
    fleet: PushFleet,
    *,
    client: ControlClient,
    observer: PushObserver,
    rotation: Rotation | None,
    senders: SenderPool | None = None,
    on_part: Callable[[PushResult], None] = lambda result: None,
) -> PushResult:
    """Bring a checkpoint into `request.rolling` servers at a time; returns the sum of all parts.

    `on_part` is called with each part that succeeded. A cancellation stops the roll after the part
    that is under way, or before it if it has sent nothing yet.

    Raises as `push`; `details["servers"]` of a PushError has all servers.
    """
    began = time.perf_counter()
    _refuse_roll(request, fleet)
    dry, watching = replace(request, dry_run=True), observer if request.dry_run else PushObserver()
    checked = await push(dry, fleet, client=client, observer=watching, rotation=rotation)
    if request.dry_run:
        return checked
    # every part gets what was checked
    part_request = replace(
        request,
        expected_digest=checked.checkpoint_digest,
        expected_draft=checked.draft_digest,
    )
    expected = fleet.expected
    parts: list[PushResult] = []
    for first in range(0, len(fleet.servers), request.rolling):
        servers = fleet.servers[first : first + request.rolling]
        try:
            result = await push(
                part_request,
                replace(fleet, servers=servers, expected=expected),
                client=client,
                observer=observer,
                senders=senders,
                rotation=rotation,
            )
        except SkyctlError as error:
            raise _roll_stopped(error, parts, servers, checked) from error
        parts.append(result)
        on_part(result)
        expected = expected.with_learned((result.learned or {}).get("digests", ()))
        part_request = replace(part_request, weight_version=result.version)
        if _cancelling() and len(parts) * request.rolling < len(fleet.servers):
            raise asyncio.CancelledError
    return _sum_of_parts(parts, time.perf_counter() - began)


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _refuse_roll(request: PushRequest, fleet: PushFleet) -> None:
    servers = len(fleet.servers)
    if request.rolling < 0:
        raise PreflightError(f"--rolling {request.rolling}: a part has at least one server")
    if request.rolling >= servers and not request.servers:  # others serve beside a canary's
        raise PreflightError(
            f"--rolling {request.rolling} would take all {servers} servers out of the router at "
            "once",
            hint=f"--rolling {servers - 1} or less"
            if servers > 1
            else "leave --rolling out: there is no other server to serve meanwhile",
        )


def _roll_stopped(
    error: SkyctlError,
    parts: Sequence[PushResult],
    servers: Sequence[PushServer],
    checked: PushResult,
) -> SkyctlError:
    """The error of the failed part, with all servers and a hint for them."""
    rows: dict[str, dict[str, Any]] = {row.server: row.to_json() for row in checked.servers}
    for part in parts:
        rows |= {row.server: row.to_json() for row in part.servers}
    rows |= {row["server"]: row for row in error.details.get("servers", [])}
    error.details = {**error.details, "servers": list(rows.values())}
    if not parts:
        return error
    # a part's version is not the fleet's: only all parts are
    error.details.pop("version", None)
    version = parts[0].version
    new = [row.server for part in parts for row in part.servers]
    names = ", ".join(server.name for server in servers)
    kind = type(error) if isinstance(error, PushError) else PushError
    return kind(
        f"the roll stopped at {names}: {', '.join(new)} at {version}, the others as they were "
        f"({error.message})",
        hint="go on: the same command again; or back to the version before: skyctl recover",
        details=error.details,
    )


def _sum_of_parts(parts: Sequence[PushResult], seconds: float) -> PushResult:
    """All parts as one result. Its freeze window is the longest part's: the fleet has none."""
    last = parts[-1]
    stages: dict[str, float] = {}
    for part in parts:
        for name, taken_s in part.stages.items():
            stages[name] = stages.get(name, 0.0) + taken_s
    return replace(
        last,
        seconds=seconds,
        gb_per_s=sum(part.gb_per_s for part in parts) / len(parts),
        freeze_window_s=max(part.freeze_window_s for part in parts),
        stages=stages,
        servers=[row for part in parts for row in part.servers],
        trial=[row for part in parts for row in part.trial],
        notes=list(dict.fromkeys(note for part in parts for note in part.notes)),
        compared=min(
            (part.compared for part in parts if part.compared),
            key=lambda compared: compared["bytes"],
            default=None,
        ),
    )
