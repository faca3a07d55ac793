"""What Tinker APIs of this machine have stored, read from their ledgers: also while they are down.

Nothing here writes to a ledger.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from skyctl.core.registry import FleetRef, known_fleets, refuse_another_file, select
from skyctl.core.tinker import storage_directory
from skyctl.core.urls import tinker_place
from skyctl.errors import FleetDownError, NotFoundError, SkyctlError
from skyctl.http.trust import verification
from skyctl.store.credentials import read_secret
from skyctl.store.paths import expanded

SCHEME = "tinker://"
_DELETE_S = 60.0
_CHECKPOINTS = """
SELECT path, model, kind, config, directory, size, created, expires, hidden,
    (SELECT ended FROM models WHERE models.id = checkpoints.model) IS NULL AS trains
FROM checkpoints ORDER BY created DESC
"""


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint of a Tinker API."""

    fleet: str
    """The fleet whose API wrote it."""
    path: str
    """Its `tinker://` path."""
    run: str
    """The training run that it is of."""
    kind: str
    """`training` (with the optimizer's state), `sampler` or `external`."""
    base_model: str
    """The base model, by the name that clients give it."""
    model: str
    """The base model's directory or hub id, as of the fleet file today."""
    rank: int
    """Rank of the adapter; 0 for a whole model."""
    directory: Path
    """Its files: a PEFT directory, or a Hugging Face checkpoint."""
    size: int
    """Bytes of its files."""
    created: float
    """When it was saved, in seconds since the epoch."""
    expires: float | None
    """When it is deleted; None if never."""
    unnamed: bool
    """Whether it was saved for one sampling client, without a name: it goes by itself."""
    trains: bool
    """Whether its run can still be trained."""


def storage_of(ref: FleetRef) -> Path:
    """The directory of a fleet's Tinker API."""
    section = ref.config.tinker
    own = storage_directory(section.storage, ref.base_dir) if section is not None else None
    return own or ref.paths.tinker


def checkpoints_of(ref: FleetRef) -> list[StoredCheckpoint]:
    """What the Tinker API of a fleet has stored, the latest first.

    Raises:
        SkyctlError: the ledger cannot be read.
    """
    path = storage_of(ref) / "ledger.sqlite"
    if not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=10)) as ledger:
            ledger.row_factory = sqlite3.Row
            return [_checkpoint(ref, row) for row in ledger.execute(_CHECKPOINTS)]
    except sqlite3.Error as error:
        raise SkyctlError(f"cannot read {path}: {error}") from error


def _checkpoint(ref: FleetRef, row: sqlite3.Row) -> StoredCheckpoint:
    config = json.loads(row["config"])
    model = ref.config.model or ""
    local = ref.base_dir / expanded(model)
    return StoredCheckpoint(
        fleet=ref.name,
        path=row["path"],
        run=row["model"],
        kind=row["kind"],
        base_model=config["base"],
        model=str(local) if local.is_dir() else model,
        rank=config["lora"]["rank"],
        directory=Path(row["directory"]),
        size=row["size"],
        created=row["created"],
        expires=row["expires"],
        unnamed=bool(row["hidden"]),
        trains=bool(row["trains"]),
    )


def find_checkpoint(path: str, ref: FleetRef | None = None) -> StoredCheckpoint:
    """The checkpoint of this `tinker://` path; without `ref`, in any fleet of this user on this
    machine.

    Raises:
        NotFoundError: no fleet's API has it, or its directory is gone.
    """
    unread: list[str] = []
    for checkpoint in _all(unread) if ref is None else checkpoints_of(ref):
        if checkpoint.path == path:
            if not checkpoint.directory.is_dir():
                raise NotFoundError(f"the files of {path} are gone from {checkpoint.directory}")
            return checkpoint
    place = f"in fleet {ref.name}" if ref else "in any fleet of this machine"
    message = f"there is no checkpoint {path} {place}"
    if unread:
        message += f" that can be read; not read: {'; '.join(unread)}"
    raise NotFoundError(message, hint="what there is: skyctl tinker ls --all")


def _all(unread: list[str]) -> Iterator[StoredCheckpoint]:
    """Those of all fleets; `unread` receives the fleets that cannot be read, with the reason."""
    for name in known_fleets():
        try:
            yield from checkpoints_of(select(None, name))
        except SkyctlError as error:
            unread.append(f"fleet {name} ({error.message})")


async def delete_checkpoints(ref: FleetRef, names: Sequence[str]) -> list[StoredCheckpoint]:
    """Have a fleet's API delete these checkpoints, and all those of these runs.

    Raises:
        NotFoundError: there is no such checkpoint or run; nothing was deleted.
        UsageError: the fleet has no API. FleetDownError: it does not answer.
        ConflictError: the fleet runs from another file of its name.
        SkyctlError: it did not delete one; those before it are deleted.
    """
    import httpx

    refuse_another_file(ref)
    place, stored = tinker_place(ref), checkpoints_of(ref)
    chosen = [entry for entry in stored if entry.path in names or entry.run in names]
    if unknown := set(names) - {entry.path for entry in chosen} - {entry.run for entry in chosen}:
        raise NotFoundError(
            f"fleet {ref.name} has no checkpoint and no run {min(unknown)}",
            hint="what there is: skyctl tinker ls --all",
        )
    headers = {"x-api-key": read_secret(place.key_file) or ""}
    verify = verification(place.url)
    async with httpx.AsyncClient(
        headers=headers, trust_env=False, timeout=_DELETE_S, verify=verify
    ) as client:
        for entry in chosen:
            # `#` is in the path of one that was overwritten
            name = quote(entry.path.removeprefix(f"{SCHEME}{entry.run}/"))
            url = f"{place.url}/api/v1/training_runs/{entry.run}/checkpoints/{name}"
            try:
                answer = await client.delete(url)
            except httpx.HTTPError as error:
                raise FleetDownError(
                    f"the Tinker API at {place.url} does not answer", hint="start it: skyctl up"
                ) from error
            if answer.status_code not in (204, 404):  # 404: it went meanwhile
                raise SkyctlError(f"{entry.path} is not deleted: {answer.text}")
    return chosen
