"""`launcher: ssh` with the real ssh and sshd; with real servers too in
`integration/test_machines.py`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.faults.remote_fleet import ADDRESSES
from tests.faults.sshd_fleet import SshdFleet, running_sshd


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[SshdFleet]:
    with running_sshd(tmp_path) as fleet:
        fleet.lay_out(**fleet.section, more="weight_transfer: {transport: shm}")
        yield fleet
        fleet.end()


def test_a_fleet_over_a_real_sshd(fleet: SshdFleet) -> None:
    refused = fleet.json("up", expect=1)["error"]["message"]
    assert refused.startswith(
        "127.0.0.2: its host key is not known here, or has changed; 127.0.0.3"
    )
    fleet.trust()
    fleet.run("up")
    rows = fleet.until({"stubs-0": "ready", "stubs-1": "ready"})
    assert [row["node"] for row in rows.values()] == list(ADDRESSES)
    assert [urlsplit(row["url"]).hostname for row in rows.values()] == list(ADDRESSES)
    for connection in fleet.tether("stubs-0").children():
        connection.kill()
    time.sleep(3)
    assert fleet.until({"stubs-0": "ready"})["stubs-0"]["pid"] == rows["stubs-0"]["pid"]
    fleet.push("shm", "disk")  # by shm each machine has a sender of its own
    fleet.run("down")
    assert fleet.everything() == []
