"""`skyctl top`: the fleet at work, live: a sample at every tick."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl import output
from skyctl.cli.fleet_calls import in_loop
from skyctl.cli.options import FileOption, FleetOption, JsonOption, seconds
from skyctl.core.registry import select
from skyctl.errors import SkyctlError

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef
    from skyctl.monitoring.samples import FleetSample


def top(
    file: FileOption = None,
    fleet: FleetOption = None,
    interval: Annotated[float, seconds("Between two samples.", least=0.2)] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one sample (over one interval) and exit.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch the fleet at work: tokens per second, load, memory, weights, the push in progress.

    Ctrl-C ends it. Without a terminal, and with --json, it prints one sample.

    \b
    Examples:
      skyctl top
      skyctl top --once --interval 5
      skyctl top --json | jq '[.data.replicas[].generation_tokens_per_s] | add'
    """
    ref = select(file, fleet)
    if as_json or once or not output.can_fill_screen():
        from skyctl.cli.top_view import once_view

        sample = in_loop(_sample_once(ref, interval))
        output.emit(sample.to_json(), once_view(sample))
        return
    with contextlib.suppress(KeyboardInterrupt):  # the usual way out of a live view
        in_loop(_watch(ref, interval))


async def _sample_once(ref: FleetRef, interval_s: float) -> FleetSample:
    from skyctl.core.status import Health
    from skyctl.monitoring.sampler import Sampler
    from skyctl.service import connect

    async with connect(ref) as running, Sampler(running, engine=ref.config.engine) as sampler:
        sample = await sampler.sample()
        if sample.status.health == Health.DOWN:
            return sample  # there are no rates to wait for
        await asyncio.sleep(interval_s)
        return await sampler.sample()


async def _watch(ref: FleetRef, interval_s: float) -> None:
    """Redraw the screen until Ctrl-C.

    Raises:
        SkyctlError: the first sample failed; later failures are shown on the screen.
    """
    from skyctl.cli.top_view import screen_view
    from skyctl.monitoring.sampler import Sampler
    from skyctl.service import connect

    async with connect(ref) as running, Sampler(running, engine=ref.config.engine) as sampler:
        sample, failure = await sampler.sample(), ""
        with output.fullscreen(lambda: screen_view(sample, failure, *output.out.size)) as live:
            while True:
                live.refresh()
                await asyncio.sleep(interval_s)
                try:
                    sample, failure = await sampler.sample(), ""
                except SkyctlError as error:
                    failure = error.message
