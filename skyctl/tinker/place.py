"""The Tinker API of one fleet: where it is, what its fleet file says, and how it is served."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.errors import SkyctlError, UsageError
from skyctl.fleetfile.schema import resolve_relative

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef
    from skyctl.fleetfile.schema import LoraSection, TinkerSection


@dataclass(frozen=True)
class Place:
    """Where clients find the API: its URL, and the file of mode 0600 with their key."""

    url: str
    key_file: Path

    def as_env(self) -> str:
        """Lines for a POSIX shell; the key itself is not printed."""
        return "\n".join(
            (
                f"export TINKER_BASE_URL={shlex.quote(self.url)}",
                f'export TINKER_API_KEY="$(cat {shlex.quote(str(self.key_file))})"',
            )
        )


def place_of(ref: FleetRef) -> Place:
    """Where the API of this fleet is, or will be.

    Raises:
        UsageError: its fleet file has no section `tinker:`.
    """
    section, _ = sections(ref)
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(section.host, section.host)
    return Place(f"http://{host}:{section.port}", ref.paths.tinker_key)


def sections(ref: FleetRef) -> tuple[TinkerSection, LoraSection]:
    """`tinker:` and `lora:` of the fleet file. Raises UsageError where one is missing."""
    tinker, lora = ref.config.tinker, ref.config.lora
    if tinker is None:
        raise UsageError(
            f"fleet {ref.name} has no Tinker API",
            hint="write `tinker: {base_model: ORG/NAME}` into its fleet file",
        )
    if lora is None:
        raise UsageError(
            f"fleet {ref.name} takes no adapters, which is what the Tinker API trains",
            hint=f"write `lora: {{max_rank: {tinker.max_rank}}}` into its fleet file; then: "
            "skyctl up",
        )
    if lora.max_rank < tinker.max_rank:
        raise UsageError(
            f"`tinker: max_rank` is {tinker.max_rank}, but the servers take rank {lora.max_rank}",
            hint=f"write `lora: {{max_rank: {tinker.max_rank}}}`; then: skyctl up",
        )
    return tinker, lora


async def serve_beside(ref: FleetRef) -> None:
    """Serve the API of a fleet that runs, until TERM.

    Raises:
        UsageError: the fleet file does not offer it. FleetDownError: the fleet does not run.
        SkyctlError: a package is missing, or an address cannot be used.
    """
    tinker, lora = sections(ref)
    try:
        from skyctl.tinker.api import Offer
        from skyctl.tinker.fleet import connected, context_of
        from skyctl.tinker.serve import Settings, serve
        from skyctl.tinker.training_process import WorkerSettings
    except ImportError as error:
        raise SkyctlError(
            f"the Tinker API needs {error.name}", hint="pip install 'skyctl-fleet[tinker]'"
        ) from error
    from skyctl.service.connect import connect
    from skyctl.store.credentials import ensure_tinker_key

    model = ref.config.model
    if model is None:
        raise UsageError(
            "the Tinker API needs a fleet that skyctl starts: it trains on the fleet's `model`"
        )
    path = resolve_relative(model, ref.base_dir)
    async with connect(ref) as fleet:
        context = context_of(path, ref.config.args)
        async with connected(fleet, context=context, most=lora.max_adapters) as servers:
            base = tinker.base_model or servers.base
            storage = tinker.storage and resolve_relative(tinker.storage, ref.base_dir)
            await serve(
                Settings(
                    Path(storage) if storage else ref.paths.tinker,
                    tinker.host,
                    tinker.port,
                    Offer(base, tinker.max_rank, tinker.max_body),
                    WorkerSettings(
                        base,
                        path,
                        tinker.device,
                        tinker.dtype,
                        tinker.threads,
                        tinker.batch_tokens,
                    ),
                ),
                ensure_tinker_key(ref.paths),
                servers,
            )
