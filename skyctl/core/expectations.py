"""Between a fleet's state and its pushes: the digests that weights must have."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from skyctl.checkpoints.checkpoint import locate, read_checkpoint
from skyctl.core.plan import ServerSpec
from skyctl.errors import SkyctlError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.request import Defaults, PushFleet, PushServer, Reading, RecordedState, Timeouts
from skyctl.push.rows import KnownRows, read_rows
from skyctl.push.verify import Record, Verification, verify
from skyctl.states import PushStage
from skyctl.store.base_weights import BaseFiles, BaseWeights
from skyctl.store.expected import by_files
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.in_doubt import NO_DOUBT, in_doubt
from skyctl.store.state import FleetState, ServerRow

_VERIFY_TIMEOUT_S = 120.0
_NOT_THE_MODEL = ("--port", "--host", "--served-model-name")
_SETTINGS = (
    "config.json",
    "generation_config.json",
    "*token*.json",
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*processor_config.json",
    "*.py",
)
"""Files beside the weights that decide what a server answers."""


def push_fleet(
    name: str, config: FleetConfig, servers: Sequence[PushServer], state: FleetState, python: str
) -> PushFleet:
    """These servers as a push needs them: with what is on record of each, and what earlier pushes
    left in it.
    """
    rows, doubts = {row.name: row for row in state.servers()}, in_doubt(state)

    def recorded(server: PushServer) -> PushServer:
        row = rows.get(server.name, ServerRow(server.name))
        record = doubts.get(server.name, NO_DOUBT)
        return replace(
            server,
            recorded=RecordedState(
                in_doubt=record is not NO_DOUBT,
                # where a session was found, weights are whole only if their digest says so
                half_updated=record.half_updated or record.stage == PushStage.RECOVER,
                thaw=record.thaw and not row.paused,
                verified_as=record.version,
                weights_awake=row.weights_awake,
                sleep_level=row.sleep_level,
                paused=row.paused,
            ),
        )

    transfer = config.weight_transfer
    return PushFleet(
        name,
        tuple(map(recorded, servers)),
        timeouts=Timeouts(
            rendezvous_s=transfer.rendezvous_timeout_s,
            update_s=transfer.update_timeout_s,
            control_s=config.control_timeout_s,
            drain_s=config.drain_timeout_s,
        ),
        reading=Reading(
            chunk_size=transfer.chunk_size,
            stage_rate=transfer.stage_rate,
            one_reader=transfer.readers == "one",
        ),
        python=python,
        defaults=Defaults(transfer.transport, transfer.verify),
    )


def informed(fleet: PushFleet, state: FleetState) -> PushFleet:
    """`fleet` with what is recorded of its servers' weights and of earlier pushes."""
    rows = {row.name: row for row in state.servers()}
    launches = state.expected.launches()
    servers = []
    for server in fleet.servers:
        row = rows.get(server.name)
        pushed_to = row is not None and row.weight_version is not None
        recorded = replace(
            server.recorded,
            version=(row and row.weight_version) or "",
            weights_digest=(row and row.weights_digest) or "",
            launched_with="" if pushed_to else launches.get(server.name, ""),
        )
        servers.append(replace(server, recorded=recorded))
    versions = [push.version for push in state.journal.pushes() if push.ok]
    return replace(
        fleet,
        servers=tuple(servers),
        expected=state.expected.everything(),
        versions=tuple(dict.fromkeys(filter(None, reversed(versions)))),
    )


def rows_of(weights: FleetWeights) -> tuple[KnownRows, ...]:
    """Rows of the fleet's checkpoint; none if it is gone or was overwritten."""
    if weights.checkpoint is None:
        return ()
    try:
        checkpoint = read_checkpoint(weights.checkpoint)
        same = checkpoint.identity_digest == weights.checkpoint_digest
        return read_rows(checkpoint) if same else ()
    except (SkyctlError, OSError):
        return ()


def records_of(
    servers: Iterable[ServerRow], weights: FleetWeights, rows: tuple[KnownRows, ...]
) -> dict[str, Record]:
    """What servers hold by the record, if it says; `rows` are those of the fleet's weights."""
    return {
        server.name: Record(
            server.weight_version,
            server.weights_digest or "",
            rows if server.weight_version and server.weight_version == weights.version else (),
        )
        for server in servers
        if server.weight_version or server.weights_digest
    }


async def verify_servers(
    targets: Sequence[ServerTarget],
    rows: Iterable[ServerRow],
    client: ControlClient,
    state: FleetState,
) -> Verification:
    """Compare what servers hold with each other, their `rows` and their checkpoint: those of a
    canary by themselves.
    """
    recorded, parts = list(rows), []
    by_weights: dict[FleetWeights, list[ServerTarget]] = {}
    for target in targets:
        by_weights.setdefault(state.weights_of(target.name), []).append(target)
    for weights, group in by_weights.items():
        records = records_of(recorded, weights, await asyncio.to_thread(rows_of, weights))
        parts.append(
            await verify(group, client=client, timeout_s=_VERIFY_TIMEOUT_S, records=records)
        )
    agreed = {part.agree for part in parts}
    reports = {report.server: report for part in parts for report in part.servers}
    return Verification(
        tuple(reports[target.name] for target in targets),
        False if False in agreed else None if None in agreed else True,
    )


def files_of(model: str) -> BaseFiles:
    """The files of a model as they are now, as far as they are on this machine."""
    directory = locate(model) if model else None
    if directory is None:
        return BaseFiles()
    try:
        shards = by_files(read_checkpoint(model).identity_digest)
    except SkyctlError:
        shards = ""  # not downloaded yet, or weights in another format
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({path for pattern in _SETTINGS for path in directory.glob(pattern)}):
        with suppress(OSError):
            digest.update(json.dumps([path.name, path.stat().st_size]).encode())
            digest.update(path.read_bytes())
    return BaseFiles(shards, digest.hexdigest())


def other_settings(base: BaseWeights, launched: BaseFiles | None) -> str:
    """Why a server that was started from these files must not serve, None if not checked."""
    if launched and base.files.settings and launched.settings != base.files.settings:
        return "configuration, tokenizer or chat template were changed since the fleet came up"
    return ""


def other_weights(
    base: BaseWeights,
    launched: BaseFiles | None,
    place: str,
    digest: str,
    unread: str = "",
) -> str:
    """Why a server that no push has reached must not serve; "" if it may. Pure.

    `digest` is that of its weights in this engine and arrangement (`place`), "" if it cannot say;
    `unread` is why it did not say what it can.
    Digests decide where there are two, files only where not. Equal digests prove equal weights also
    where the engine or its arguments are others.
    """
    if digest and digest in base.digests.values():
        return ""
    expected = base.digests.get(place, "")
    if expected and digest:
        return f"it holds other weights than the fleet began with (digest {digest}, not {expected})"
    if launched and base.files.shards:
        same = launched.shards == base.files.shards
        return "" if same else "its checkpoint was overwritten since the fleet came up"
    if unread:
        return f"its weights could not be read ({unread})"
    if base.digests and not digest:
        return "its weights cannot be compared with those that the fleet began with"
    return ""


def arguments_of(spec: ServerSpec) -> str:
    """Identifies the arguments that shape a server's model: others may give other digests."""
    arguments = spec.as_written(spec.argv)
    for option in _NOT_THE_MODEL:
        if option in arguments:
            at = arguments.index(option)
            del arguments[at : at + 2]
    return hashlib.blake2b(json.dumps(arguments).encode(), digest_size=4).hexdigest()
