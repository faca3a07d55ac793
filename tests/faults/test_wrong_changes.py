"""Wrong values in the fleet file of three servers that serve: at most one of them is touched, no
request fails, and all run with their old settings afterwards.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.stub_fleet import StubFleet
from tests.load import ThreadedLoad

FILES = {
    "model: ./model": ["model: ./missing", "model: ./other", "model: ./python"],
    "python: ./python": ["python: ./missing", "python: /bin/false", "python: /bin/true"],
    "device: cpu": ["device: cuda", "device: cuda\ngpus: [7]", "device: cpu\nengine: nothing"],
    "replicas: 3": ["replicas: 0", "replicas: 3\nports: [70000]", "replicas: 3\nports: [TAKEN]"],
    "{}": [
        '{"exit_at_start": true}',
        '{"startup_delay_s": 60}',
        "not JSON",
        '{"/is_paused": {"kind": "status"}}',
        '{"/is_paused": {"kind": "reset"}}',
    ],
    "stop_timeout_s: 5": [
        "stop_timeout_s: 5\nargs: {port: 5}",
        "stop_timeout_s: 5\nargs: {token-delay-s: never}",
        "stop_timeout_s: 5\nrouter: {policy: nothing}",
        "stop_timeout_s: 5\ntensor_parallel_size: 0",
    ],
}
CHANGES = [(old, new) for old, every in FILES.items() for new in every]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StubFleet, ThreadedLoad]]:
    fleet = StubFleet(tmp_path_factory.mktemp("serving"))
    fleet.write(replicas=3)
    file = fleet.directory / "fleet.yaml"
    file.write_text(file.read_text().replace("startup_timeout_s: 20", "startup_timeout_s: 3"))
    (fleet.directory / "other").mkdir()
    fleet.run("up")
    urls = fleet.json("urls")["data"]
    load = ThreadedLoad(urls["router"], Path(urls["access"]["api_key_file"]).read_text().strip())
    yield fleet, load
    load.end()
    fleet.run("down")


def served(fleet: StubFleet) -> dict[str, Any]:
    status = fleet.json("status")["data"]
    assert status["health"] == "healthy"
    return {replica["name"]: replica["pid"] for replica in status["replicas"]}


@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_a_wrong_value_touches_at_most_one_server_and_fails_no_request(
    serving: tuple[StubFleet, ThreadedLoad], old: str, new: str
) -> None:
    fleet, load = serving
    file: Path = fleet.directory / "fleet.yaml"
    right = file.read_text()
    before, answers = served(fleet), load.answers
    assert old in right
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            file.write_text(right.replace(old, new.replace("TAKEN", str(port))))
            process = fleet.start("up")
            out, err = process.communicate(timeout=120)
    finally:
        file.write_text(right)
    after = served(fleet)
    assert process.returncode != 0, out + err
    assert len([name for name in before if before[name] != after[name]]) <= 1
    assert "nothing to do" in fleet.run("up", "--dry-run").stdout
    assert load.failures == [] and load.answers > answers
