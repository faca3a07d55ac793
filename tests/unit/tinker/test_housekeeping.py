"""What goes by itself, and what stays."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")
from skyctl.tinker import records, requests
from skyctl.tinker.housekeeping import Housekeeping, Keep
from skyctl.tinker.ledger import Ledger
from tests.unit.tinker.recording_worker import Notes, training_of


class Sampling:
    """Deletes rows and directories, and has no servers."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def delete(self, row: Any) -> None:
        await asyncio.to_thread(Path(row["directory"]).rmdir)
        await self.ledger.write("DELETE FROM checkpoints WHERE path = ?", row["path"])


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


def names_in(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.is_dir()]


def housekeeping(ledger: Ledger, directory: Path, **keep: Any) -> Housekeeping:
    training = training_of(ledger, directory, Notes())
    return Housekeeping(ledger, training, Sampling(ledger), Keep(**keep))  # type: ignore[arg-type]


async def test_disk_and_rows_stay_as_many_after_300_rounds_of_unnamed_samplers(
    ledger: Ledger, tmp_path: Path
) -> None:
    house = housekeeping(ledger, tmp_path, samplers=4, recent_s=0.0)
    config = json.dumps({"base": "b", "lora": {"rank": 8}})
    counts = []
    for number in range(300):
        directory = tmp_path / str(number)
        directory.mkdir()
        path = f"tinker://s:train:0/sampler_weights/{number}"
        extra = {"path": path, "sampler": f"s:sample:{number}", "session": "s", "inflight": False}

        def commit(
            connection: sqlite3.Connection, directory: Path = directory, extra: Any = extra
        ) -> None:
            statements = requests.add_checkpoint(
                "s:train:0", requests.SAVE_SAMPLER, str(directory), config, 1, extra
            )
            for sql, parameters in (*statements, *requests.add_sampler("s:train:0", extra)):
                connection.execute(sql, parameters)

        await ledger.run(commit)
        if number % 10 == 9:
            await house.remove_old()
            counts.append(len(names_in(tmp_path)))
    assert set(counts) == {4}
    assert "299" in names_in(tmp_path)
    [(samplers,)] = await ledger.rows("SELECT COUNT(*) FROM samplers")
    await ledger.write("UPDATE samplers SET used = 0")
    await house.remove_old()
    [(after,)] = await ledger.rows("SELECT COUNT(*) FROM samplers")
    assert (samplers, after) == (300, 0)  # there is no such session


@pytest.mark.parametrize("rank", [0, 8])
async def test_weights_stay_while_samples_of_them_wait(
    ledger: Ledger, tmp_path: Path, rank: int
) -> None:
    house, directory = housekeeping(ledger, tmp_path), tmp_path / "0"
    directory.mkdir()
    config = json.dumps({"lora": {"rank": rank}})
    extra = {"path": "tinker://m/0", "sampler": "s:sample:0", "session": "s", "inflight": False}
    kind = requests.SAVE_SAMPLER

    def commit(connection: sqlite3.Connection) -> None:
        statements = requests.add_checkpoint("m", kind, str(directory), config, 1, extra)
        for sql, parameters in (*statements, *requests.add_sampler("m", extra)):
            connection.execute(sql, parameters)
        records.add_request(connection, "s:sample:0", 1, "sample")
        connection.execute("UPDATE samplers SET used = 0")  # when the last of them was accepted

    await ledger.run(commit)
    await house.remove_old()
    assert directory.exists()
    await ledger.write("UPDATE requests SET state = 'done'")
    await ledger.write("INSERT INTO samplers VALUES ('base', 's', NULL, NULL, 0, 0)")
    await ledger.run(lambda c: records.add_request(c, "base", 1, "sample"))
    await house.remove_old()
    assert not directory.exists()


@pytest.mark.parametrize("ending", ["finished", "gone", "waits", "alive"])
async def test_a_run_whose_client_is_gone_leaves_its_checkpoints_only(
    ledger: Ledger, tmp_path: Path, ending: str
) -> None:
    house, old = housekeeping(ledger, tmp_path, runs_s=3600.0), time.time() - 1800
    for number in range(20):
        session, model = f"s{number}", f"s{number}:train:0"
        (tmp_path / f"snapshot-{number}").mkdir()

        def commit(
            connection: sqlite3.Connection,
            number: int = number,
            session: str = session,
            model: str = model,
        ) -> None:
            connection.execute(
                "INSERT INTO sessions (id, created, seen, tags) VALUES (?, 0, ?, '[]')",
                (session, old if ending == "finished" else old - 3600),
            )
            records.add_model(connection, model, session, {"lora": {"rank": 0}}, None)
            records.add_request(connection, model, 0, requests.CREATE, None, b"x")
            snapshot = str(tmp_path / f"snapshot-{number}")
            connection.execute("UPDATE models SET snapshot = ? WHERE id = ?", (snapshot, model))

        await ledger.run(commit)
    state = "accepted" if ending == "waits" else "done"
    await ledger.write("UPDATE requests SET state = ?", state)
    if ending == "finished":
        await ledger.write("UPDATE sessions SET finished = '{}'")
    if ending == "alive":
        await ledger.write("UPDATE sessions SET seen = ?", time.time())
    await ledger.write(
        "INSERT INTO checkpoints (path, model, kind, name, directory, config, optimizer, created, "
        "size) VALUES ('p', 's0:train:0', 'training', 'c', 'd', '{}', 1, 0, 1)"
    )
    await house.remove_old()
    kept = 20 if ending in ("waits", "alive") else 0
    assert sum("snapshot" in name for name in names_in(tmp_path)) == kept
    counts = [
        (await ledger.rows(f"SELECT COUNT(*) FROM {table}"))[0][0]
        for table in ("sessions", "requests", "models", "checkpoints")
    ]
    assert counts == [kept, kept, kept or 1, 1]
    if not kept:
        with pytest.raises(records.Missing, match="continue from a checkpoint"):
            await ledger.run(lambda c: records.running(c, "s0:train:0"))
