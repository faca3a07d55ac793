"""Adapters that servers are given out of a process's memory, and the fleet's own copy of them.

A version that came from a GPU is in no file at first. Servers that hold it write it, in the
background, where its path says; until then only they can give it to a server that restarts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from skyctl.adapters.fleet import AdapterFleet
from skyctl.adapters.peft import UNWRITTEN, WEIGHTS, Adapter
from skyctl.adapters.requests import SentTensors
from skyctl.checkpoints.header import read_header, torch_name
from skyctl.engines.base import Server, lacks_method
from skyctl.errors import PreflightError, ServerError, SkyctlError
from skyctl.http.fanout import fan_out, require_all
from skyctl.http.target import ServerTarget
from skyctl.store import adapters as store
from skyctl.wire.worker import WorkerMethod

CANNOT_TAKE = "cannot copy the adapter out of the trainer's memory"
"""In the message of a refusal after which the tensors can go through a file."""

MAY_PASS = "it cannot reach the tensors"
"""Begins a worker's reason that may be gone with the next adapter: memory ran out, for one."""

_WRITE_TIMEOUT_S = 60.0
"""For all that is to be written at a time."""
_POLL_S = 0.05


async def give(
    fleet: AdapterFleet,
    adapter: Adapter,
    sent: SentTensors,
    path: Path,
    targets: Sequence[ServerTarget],
    timeout_s: float | None,
) -> None:
    """Have every server's workers copy the tensors, and compare them with what was sent: servers
    load them by `path` then. Users see nothing of it. A server without the method loads from the
    file, if there is one.

    Raises:
        PreflightError: a server cannot (`CANNOT_TAKE`).
        PartialFailure, ServerError: it copied something else, or did not answer.
    """
    begins = min(tensor.begin for tensor in adapter.tensors)
    question = {
        "path": str(path),
        "tensors": [
            [t.name, torch_name(t.dtype, t.name), t.shape, t.begin - begins, t.nbytes]
            for t in adapter.tensors
        ],
        "numbers": sent.numbers,
        "source": sent.export or [str(path / WEIGHTS), begins],
        "needed": unwritten(fleet),
    }

    async def take(target: ServerTarget) -> str:
        try:
            server = fleet.server(target, timeout_s)
            answers = await server.ask_workers(WorkerMethod.ADAPTER_TAKE, question)
        except ServerError as error:
            if not lacks_method(error):
                raise
            answers = ["its skyctl is older"] if sent.export else []
        return next(filter(None, map(str, answers)), "")

    outcomes = await fan_out(targets, take, timeout_s=timeout_s or fleet.timeout_s)
    require_all(outcomes, "adapters")
    for outcome in outcomes:
        if outcome.value and sent.export:
            raise PreflightError(
                f"{outcome.server} {CANNOT_TAKE}: {outcome.value}",
                hint="load it from a directory, or give its tensors on the CPU",
            )


async def release(fleet: AdapterFleet, targets: Sequence[ServerTarget], paths: list[str]) -> None:
    """Let workers drop what files have. One that does not answer drops it with the next adapter."""

    async def drop(target: ServerTarget) -> None:
        await fleet.server(target).ask_workers(WorkerMethod.ADAPTER_RELEASE, {"paths": paths})

    await fan_out(targets, drop, timeout_s=fleet.timeout_s)


async def keep(fleet: AdapterFleet) -> tuple[str, ...]:
    """Have servers write what only they hold, each version by the first that can. Returns a
    sentence about each version that is still in no file.
    """
    written, reasons = [], dict[str, str]()
    with suppress(TimeoutError):
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            for path in unwritten(fleet):
                reason = "no server holds it"
                for target in fleet.targets()[0]:
                    try:
                        if await _written(fleet.server(target), Path(path)):
                            written.append(path)
                            break
                    except (SkyctlError, OSError) as error:  # it may also be gone by now
                        reason = str(error)
                reasons[path] = reason
    if written:
        await release(fleet, fleet.targets()[0], written)
    late = f"it was not written in {_WRITE_TIMEOUT_S:.0f} s"
    return tuple(
        f"the adapter in {path} is in servers' memory only, so that none that restarts can load it "
        f"({reasons.get(path, late)}): sync it again"
        for path in unwritten(fleet)
    )


def unwritten(fleet: AdapterFleet) -> list[str]:
    """The paths of versions in no file yet that clients may have requested."""
    paths = store.requested_paths(fleet.state)
    return [path for path in paths if os.path.exists(f"{path}/{UNWRITTEN}")]  # noqa: PTH110


async def _written(server: Server, path: Path) -> bool:
    """Whether this server has written the tensors of a version, all of them and as they were sent.

    Raises:
        ServerError: it does not answer, or cannot write them.
    """
    file = path / UNWRITTEN
    offset = min(tensor.begin for tensor in (await asyncio.to_thread(read_header, file))[1])
    question = {"path": str(path), "file": str(file), "offset": offset}
    while True:
        answers = await server.ask_workers(WorkerMethod.ADAPTER_WRITE, question)
        match answers[0] if answers else "absent":
            case "written":
                file.rename(path / WEIGHTS)
                return True
            case "absent":
                return False
            case "writing":
                await asyncio.sleep(_POLL_S)
            case failure:
                raise ServerError(f"{server.target.name} cannot write {path}: {failure}")
