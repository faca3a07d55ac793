"""`python -m skyctl.tinker SETTINGS`: the API process, started by the fleet's supervisor.

It asks that supervisor, and never starts one: a supervisor started from here would end with it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from skyctl.core.tinker import TinkerSettings, context_of
from skyctl.errors import SkyctlError
from skyctl.store.credentials import ensure_tinker_key
from skyctl.store.paths import fleet_paths
from skyctl.supervisor.client import RemoteFleet
from skyctl.tinker.api import Offer
from skyctl.tinker.fleet import connected
from skyctl.tinker.serve import Settings, serve
from skyctl.tinker.training_process import WorkerSettings
from skyctl.tinker.weights import ServedWeights


async def beside(asked: TinkerSettings) -> None:
    """Serve the API of a running fleet, until TERM.

    Raises:
        FleetDownError: the fleet does not run. SkyctlError: an address cannot be used.
    """
    paths = fleet_paths(asked.fleet)
    worker = WorkerSettings(
        asked.base_model,
        asked.model,
        asked.device,
        asked.dtype,
        asked.threads,
        asked.batch_tokens,
        asked.gradient_checkpointing,
    )
    settings = Settings(
        Path(asked.storage) if asked.storage else paths.tinker,
        asked.host,
        asked.port,
        Offer(asked.base_model, asked.max_rank, asked.full_parameters, asked.max_body),
        worker,
    )
    context = asked.context or context_of(asked.model)
    async with RemoteFleet.on_this_machine(paths) as fleet:
        weights = ServedWeights(
            fleet, asked.model, settings.directory, offered=asked.full_parameters
        )
        async with connected(fleet, weights, context=context, most=asked.max_adapters) as servers:
            await serve(settings, ensure_tinker_key(paths), servers)


def main() -> int:
    settings = TinkerSettings.of_argument(sys.argv[1])
    sys.argv = ["tinker"]  # shown to others as the command that acts
    try:
        asyncio.run(beside(settings))
    except SkyctlError as error:
        sys.stderr.write(f"{error.kind}: {error.message}\n")
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
