"""Trial, rolling and kept pushes on real vLLM CPU servers behind the real router."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import kill
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.fleet_cli import FleetCli

pytestmark = pytest.mark.real

PROMPT_IDS = [5, 9, 13, 17, 21]
MAX_TOKENS = 12
BODY = {
    "prompt": PROMPT_IDS,
    "max_tokens": MAX_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@dataclass
class Asked:
    """What a client heard, and what failed."""

    answers: list[tuple[int, ...]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@contextmanager
def asking(fleet: FleetCli, clients: int = 3) -> Iterator[Asked]:
    """Clients in a thread of their own ask the router without a break while the block runs."""
    asked, over = Asked(), threading.Event()
    urls = fleet.json("urls")["data"]
    key = fleet.json("urls", "--show-key")["data"]["api_key"]

    async def client(http: httpx.AsyncClient) -> None:
        while not over.is_set():
            try:
                answer = await http.post(
                    f"{urls['router']}/v1/completions", json={**BODY, "model": urls["model"]}
                )
            except httpx.HTTPError as error:
                asked.failures.append(repr(error))
                continue
            if answer.status_code == 200:
                asked.answers.append(tuple(answer.json()["choices"][0]["token_ids"]))
            else:
                asked.failures.append(f"{answer.status_code} {answer.text[:100]}")
                await asyncio.sleep(0.1)

    async def all_clients() -> None:
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(headers=headers, timeout=60.0, trust_env=False) as http:
            await asyncio.gather(*(client(http) for _ in range(clients)))

    thread = threading.Thread(target=lambda: asyncio.run(all_clients()))
    thread.start()
    try:
        yield asked
    finally:
        over.set()
        thread.join(90.0)
        assert not thread.is_alive()


def answer_of(fleet: FleetCli) -> tuple[int, ...]:
    with asking(fleet, clients=1) as asked:
        while not asked.answers and len(asked.failures) < 50:
            threading.Event().wait(0.05)
    assert asked.answers, asked.failures
    return asked.answers[0]


def trial_file(fleet: FleetCli, tokens: tuple[int, ...]) -> str:
    prompt = {
        "prompt_token_ids": PROMPT_IDS,
        "max_tokens": MAX_TOKENS,
        "sampling": {"ignore_eos": True},
        "expect": {"token_ids": list(tokens), "min_logprob": -50},
    }
    (fleet.directory / "trial.json").write_text(json.dumps([prompt]))
    return "trial.json"


def until_replaced(fleet: FleetCli, pid: int, timeout_s: float = 240.0) -> None:
    """Return when the first replica is ready in another process."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        first = fleet.json("status", expect=None)["data"]["replicas"][0]
        if first["pid"] not in (None, pid) and first["state"] == "ready":
            return
        time.sleep(1.0)  # a process of vLLM's starts for most of a minute
    raise AssertionError(first)


def current_of_kept(fleet: FleetCli) -> dict[str, bool]:
    """Of every version that is kept, whether the fleet runs it."""
    return {one["version"]: one["current"] for one in fleet.json("weights", "kept")["data"]["kept"]}


def versions(fleet: FleetCli) -> set[str | None]:
    return {row["weight_version"] for row in fleet.json("status")["data"]["replicas"]}


def test_trial_rolling_and_kept_pushes(real_fleet: FleetCli) -> None:
    fleet = real_fleet
    fleet.run("sync-weights", "checkpoints/a", "--weight-version", "A")
    of_a = answer_of(fleet)

    # a roll: nothing fails, and nothing but A or B is heard
    with asking(fleet) as asked:
        rolled = fleet.json(
            "sync-weights", "checkpoints/b", "--weight-version", "B", "--rolling", "1"
        )
    of_b = answer_of(fleet)
    assert of_a != of_b
    assert asked.failures == []
    assert set(asked.answers) == {of_a, of_b}
    assert versions(fleet) == {"B"}
    print("roll:", len(asked.answers), "answers,", rolled["data"]["job"]["result"]["seconds"], "s")

    # a trial that is right for B refuses A: nobody hears A, and B is back
    trial = trial_file(fleet, of_b)
    options = ("checkpoints/a", "--weight-version", "A2", "--trial", trial)
    with asking(fleet) as asked:
        refused = fleet.json("sync-weights", *options, expect=1)
    assert refused["error"]["kind"] == "TrialFailed"
    rows = refused["data"]["job"]["error"]["details"]["trial"]
    assert [tuple(row["got"]["token_ids"]) for row in rows] == [of_a, of_a]
    assert set(asked.answers) == {of_b}
    assert {failure[:3] for failure in asked.failures} <= {"503"}
    assert versions(fleet) == {"B"}
    assert answer_of(fleet) == of_b
    print("refused:", len(asked.answers), "answers,", len(asked.failures), "times 503")

    # and lets B pass, also in a roll; a refused roll stops at its first server
    passed = fleet.json("sync-weights", "checkpoints/b", "--weight-version", "B2", "--trial", trial)
    assert [row["ok"] for row in passed["data"]["job"]["result"]["trial"]] == [True, True]
    with asking(fleet) as asked:
        fleet.json("sync-weights", *options, "--rolling", "1", expect=1)
    assert asked.failures == []
    assert set(asked.answers) == {of_b}
    assert versions(fleet) == {"B2"}

    # kept: the trainer's directory goes, a killed replica comes back with it all the same
    shutil.copytree(fleet.directory / "checkpoints/a", fleet.directory / "checkpoints/step-1")
    fleet.run("sync-weights", "checkpoints/step-1", "--weight-version", "kept", "--keep")
    shutil.rmtree(fleet.directory / "checkpoints/step-1")
    victim = fleet.json("status")["data"]["replicas"][0]
    kill(victim["pid"], signal.SIGKILL)
    until_replaced(fleet, victim["pid"])
    assert versions(fleet) == {"kept"}
    fleet.run("sync-weights", "checkpoints/b", "--weight-version", "B3")
    fleet.run("sync-weights", "--rollback", "kept", "--rolling", "1")
    assert answer_of(fleet) == of_a
    assert current_of_kept(fleet)["kept"] is True
    fleet.run("weights", "forget", "kept", expect=1)
    fleet.run("sync-weights", "checkpoints/b", "--weight-version", "B4")
    fleet.run("weights", "forget", "kept")
    assert "kept" not in current_of_kept(fleet)


def test_a_sleeping_fleet_is_pushed_to_as_one_transaction(real_fleet: FleetCli) -> None:
    """On CPU, sleep is a state only; what vLLM answers to waking in parts is real."""
    fleet = real_fleet
    fleet.run("sync-weights", "checkpoints/a", "--weight-version", "A")
    of_a = answer_of(fleet)
    fleet.run("sleep")
    assert {row["state"] for row in fleet.json("status")["data"]["replicas"]} == {"asleep"}
    fleet.run("sync-weights", "checkpoints/b", expect=1)
    woken = fleet.json("sync-weights", "checkpoints/b", "--weight-version", "B", "--colocated")
    rows = woken["data"]["job"]["result"]["servers"]
    assert [(row["state"], row["version"], row["sleep_level"]) for row in rows] == [
        ("ready", "B", 0),
        ("ready", "B", 0),
    ]
    of_b = answer_of(fleet)
    assert of_b != of_a
    slept = fleet.json(
        "sync-weights", "checkpoints/a", "--weight-version", "A2", "--sleep-after", "1"
    )
    rows = slept["data"]["job"]["result"]["servers"]
    assert [(row["state"], row["sleep_level"]) for row in rows] == [("asleep", 1)] * 2
    assert {row["state"] for row in fleet.json("status")["data"]["replicas"]} == {"asleep"}
    fleet.run("wake")
    assert answer_of(fleet) == of_a


def test_a_dry_run_tells_what_a_push_then_takes(real_fleet: FleetCli) -> None:
    fleet = real_fleet
    done = fleet.json("sync-weights", "checkpoints/b", "--transport", "shm", "--stage", "host")
    result = done["data"]["job"]["result"]
    plan = fleet.json("sync-weights", "checkpoints/b", "--transport", "shm", "--dry-run")
    told = plan["data"]["job"]["result"]["plan"]
    ways = {one["stage"]: one for one in told["forecasts"]}
    assert set(ways) == {"host", "stream"}
    assert ways["stream"]["chosen"]
    print("freeze:", result["freeze_window_s"], "told:", ways["host"]["freeze_s"])
    print(told["assumptions"])
    assert ways["host"]["freeze_s"] == pytest.approx(result["freeze_window_s"], rel=0.01)


def test_what_a_push_cannot_change_is_refused_or_noted(
    real_fleet: FleetCli, tmp_path: Path
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}

    def variant(name: str, **changes: Any) -> str:
        directory = shutil.copytree(real_fleet.directory / "checkpoints/b", tmp_path / name)
        config = json.loads((directory / "config.json").read_text()) | changes
        written = {key: value for key, value in config.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(written))
        return str(directory)

    yarn = variant("yarn", rope_parameters=rope)
    refused = real_fleet.run("sync-weights", yarn, expect=1).stderr
    assert "rope_parameters.rope_type is yarn here, the servers run default" in refused
    real_fleet.run("sync-weights", yarn, "--dry-run", "--allow-config", "rope_parameters")
    # as transformers 4 wrote it, with other stop tokens
    older = variant("older", rope_parameters=None, layer_types=None, rope_theta=1e4)
    (tmp_path / "older" / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    (note,) = real_fleet.data("sync-weights", older, "--dry-run")["job"]["result"]["notes"]
    assert note.startswith("generation_config.json (stop tokens")
