"""`tinker:` in a fleet file: the API is a process of the fleet, whoever is killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")
pytest.importorskip("google.protobuf")

from skyctl.launch.local.host import free_port
from tests import forking
from tests.faults.ssh_fleet import B, SshFleet
from tests.faults.stub_fleet import StubFleet
from tests.pids import gone, kill
from tests.tiny import make_tiny_checkpoint

EXTRA = """\
args: {{max-model-len: 256}}
lora: {{max_rank: 32}}
tinker: {{base_model: org/tiny, port: {port}, storage: {storage}}}
"""


@pytest.fixture(scope="module", autouse=True)
def apis_have_torch() -> Iterator[None]:
    forking.use(servers=forking.TRAINER)
    yield
    forking.use()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[StubFleet]:
    found = StubFleet(tmp_path)
    yield found
    found.run("down")


def tinker(fleet: StubFleet) -> dict[str, Any]:
    """Its row in `status`."""
    row: dict[str, Any] = fleet.json("status")["data"]["tinker"]
    return row


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/healthz").json()["status"] == "ok"
    except httpx.TransportError:
        return False


def write(fleet: StubFleet, *, storage: str = "./runs") -> str:
    """The fleet file, with an address of its own for the API; its URL."""
    port = free_port("127.0.0.1")
    fleet.write(extra=EXTRA.format(storage=storage, port=port))
    return f"http://127.0.0.1:{port}"


def test_an_api_that_is_killed_is_back_at_its_address_and_down_ends_it(fleet: StubFleet) -> None:
    url = write(fleet)
    first = fleet.json("up")["data"]["tinker"]
    assert (first["state"], first["url"]) == ("ready", url)
    exports = fleet.run("urls", "--format", "tinker").stdout.splitlines()
    assert exports[0] == f"export TINKER_BASE_URL={url}"
    key_file = Path(exports[1].removeprefix('export TINKER_API_KEY="$(cat ').removesuffix(')"'))
    key = key_file.read_text()
    assert key.startswith("tml-") and key_file.stat().st_mode & 0o777 == 0o600

    kill(first["pid"])
    deadline = time.monotonic() + 60
    while (second := tinker(fleet))["state"] != "ready" or second["pid"] == first["pid"]:
        assert time.monotonic() < deadline, second
        time.sleep(0.1)
    assert healthy(url) and second["restart_reason"] == "was killed by SIGKILL"
    headers = {"X-API-Key": key.strip()}
    answer = httpx.get(f"{url}/api/v1/sessions", headers=headers)
    assert answer.status_code == 200  # its key is that of before
    whole = {"session_id": "s", "model_seq_id": 0, "base_model": "org/tiny"}
    answer = httpx.post(f"{url}/api/v1/create_model", headers=headers, json=whole)
    assert answer.status_code == 400 and "tinker: full_parameters" in answer.json()["detail"]
    assert (fleet.directory / "runs" / "ledger.sqlite").exists()

    fleet.run("down")
    assert gone(second["pid"]) and not healthy(url)
    assert "tinker" in fleet.json("logs", "tinker")["data"]["logs"]
    assert key_file.read_text() == key


def test_a_base_that_cannot_be_trained_is_shown_before_a_client_asks(fleet: StubFleet) -> None:
    write(fleet)
    fleet.json("up")
    deadline = time.monotonic() + 60
    while not (row := tinker(fleet))["reason"]:
        assert time.monotonic() < deadline, row
        time.sleep(0.1)
    assert "the training worker did not start" in row["reason"]
    assert (row["state"], row["ranks"], row["models"]) == ("ready", [], 0)
    status = fleet.json("status")["data"]
    [reason] = status["reasons"]
    assert status["health"] == "degraded" and reason["hint"] == "skyctl logs tinker"
    assert reason["message"].startswith("the Tinker API reports: the training worker did not")


def test_an_api_outlives_its_supervisor_and_another_address_restarts_it_alone(
    fleet: StubFleet,
) -> None:
    write(fleet)
    before = fleet.json("up")["data"]
    kill(before["supervisor_pid"])
    after = fleet.json("up")["data"]
    assert after["supervisor_pid"] != before["supervisor_pid"]
    assert (after["tinker"]["state"], after["tinker"]["pid"]) == ("ready", before["tinker"]["pid"])

    url = write(fleet)
    moved = fleet.json("up")["data"]
    assert moved["tinker"]["url"] == url and healthy(url)
    assert gone(before["tinker"]["pid"])
    assert [row["pid"] for row in moved["replicas"]] == [row["pid"] for row in before["replicas"]]


def test_an_up_whose_api_cannot_start_says_why_and_leaves_nothing(fleet: StubFleet) -> None:
    (fleet.directory / "taken").write_text("")  # where its directory should be
    write(fleet, storage="./taken")
    file = fleet.directory / "fleet.yaml"
    file.write_text(file.read_text().replace("{backoff_s: 0.05}", "{policy: never}"))
    failed = fleet.json("up", "--rollback", expect=1)
    said = failed["error"]["message"]
    assert "tinker exited with code" in said and "taken" in said
    assert "taken" in failed["data"]["logs"]["tinker"][-1]
    assert fleet.json("status", expect=0)["data"]["health"] == "down"


def test_a_trainer_on_another_machine_is_shown_and_ends_with_the_api(tmp_path: Path) -> None:
    fleet, shared = SshFleet(tmp_path), tmp_path / "shared"
    shared.mkdir()
    model = make_tiny_checkpoint(shared / "tiny", seed=1)
    port, section = free_port("127.0.0.1"), f"tinker: {{machine: me@{B}, "
    extra = EXTRA.format(storage=shared / "runs", port=port).replace("tinker: {", section)
    fleet.lay_out(more=f"shared_dir: {shared}\n{extra}")
    file = fleet.directory / "fleet.yaml"
    file.write_text(file.read_text().replace(f"{fleet.directory}/model", str(model)))

    def ranks(but: int = 0) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 90
        while not (row := tinker(fleet))["ranks"] or row["ranks"][0]["pid"] == but:
            assert time.monotonic() < deadline, row
            time.sleep(0.2)
        return list(row["ranks"])

    def trainers() -> list[int]:
        return [p.pid for p in fleet._of(B, lambda p: "skyctl.tinker.worker" in p.cmdline())]

    try:
        fleet.json("up")
        [first] = ranks()
        assert first["device"] == f"cpu of me@{B}" and trainers() == [first["pid"]]
        kill(tinker(fleet)["pid"])
        assert gone(first["pid"], within_s=20)
        [second] = ranks(but=first["pid"])
        assert trainers() == [second["pid"]]
        fleet.run("down")
        assert gone(second["pid"], within_s=20) and fleet.everything() == []
    finally:
        fleet.end()
