"""Between a fleet's state and its pushes: the digests that weights must have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import replace

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.core.plan import ServerSpec
from skyctl.errors import SkyctlError
from skyctl.push.request import PushFleet
from skyctl.push.rows import KnownRows, read_rows
from skyctl.push.verify import Record
from skyctl.store.contents import known_content
from skyctl.store.expected import by_files
from skyctl.store.state import FleetState, FleetWeights, ServerRow

_NOT_THE_MODEL = ("--port", "--host", "--served-model-name")


def informed(fleet: PushFleet, state: FleetState, *, by_tensor: bool = False) -> PushFleet:
    """`fleet` with what is recorded of its servers' weights and of earlier pushes."""
    rows = {row.name: row for row in state.servers()}
    launches = state.expected.launches()
    servers = []
    for server in fleet.servers:
        row = rows.get(server.name)
        pushed_to = row is not None and row.weight_version is not None
        servers.append(
            replace(
                server,
                weights_digest=(row and row.weights_digest) or "",
                launched_with="" if pushed_to else launches.get(server.name, ""),
            )
        )
    content = known_content(state.path.parent) if by_tensor else None
    return replace(fleet, servers=tuple(servers), expected=state.expected.known(), content=content)


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
    """What servers hold by the record; `rows` are those of the fleet's weights."""
    return {
        server.name: Record(
            server.weight_version,
            server.weights_digest or "",
            rows if server.weight_version and server.weight_version == weights.version else (),
        )
        for server in servers
    }


def model_on_disk(spec: ServerSpec) -> str:
    """Identifies the files of the directory that a server is started with; "" if unknown."""
    if "--model" not in spec.argv:
        return ""
    try:
        checkpoint = read_checkpoint(spec.argv[spec.argv.index("--model") + 1])
    except SkyctlError:
        return ""  # a hub id that vLLM fetches itself, or weights in another format
    return by_files(checkpoint.identity_digest)


def arguments_of(spec: ServerSpec) -> str:
    """Identifies the arguments that shape a server's model: others may give other digests."""
    told = list(spec.argv)
    for option in _NOT_THE_MODEL:
        if option in told:
            at = told.index(option)
            del told[at : at + 2]
    return hashlib.blake2b(json.dumps(told).encode(), digest_size=4).hexdigest()
