"""`skyctl top`: the fleet at work, live."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl.cli.options import FileOption, FleetOption, JsonOption

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef
    from skyctl.monitoring.sample import FleetSample


def top(
    file: FileOption = None,
    fleet: FleetOption = None,
    interval: Annotated[
        float, typer.Option(min=0.2, metavar="SECONDS", help="Between two samples.")
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one sample (over one interval) and exit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch the fleet at work: tokens per second, load, memory, weights, the push in progress.

    Keys: up and down select a replica, p pauses and r resumes it (without a selection, the whole
    fleet), l follows its log, q quits. Without a terminal, and with --json, it prints one sample.

    \b
    Examples:
      skyctl top
      skyctl top --once --interval 5
      skyctl top --json | jq '[.data.replicas[].generation_tokens_per_s] | add'
    """
    from skyctl import output
    from skyctl.core.registry import select

    ref = select(file, fleet)
    if as_json or once or not output.can_fill_screen():
        from skyctl.cli.top_view import once_view

        sample = asyncio.run(_look_once(ref, interval))
        output.emit(sample.to_json(), once_view(sample))
        return
    from skyctl.cli.top_live import watch

    asyncio.run(watch(ref, interval))


async def _look_once(ref: FleetRef, interval_s: float) -> FleetSample:
    from skyctl.monitoring.sampler import Sampler
    from skyctl.service.connect import connect

    async with connect(ref) as running, Sampler(running, engine=ref.config.engine) as sampler:
        sample = await sampler.sample()
        if sample.status.health == "down":
            return sample  # there are no rates to wait for
        await asyncio.sleep(interval_s)
        return await sampler.sample()
