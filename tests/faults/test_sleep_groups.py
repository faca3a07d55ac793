"""Two fleets that share their GPUs: one is awake at a time, whatever dies in a switch."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyctl.kill_points import SWITCH, VARIABLE
from skyctl.store.state import FleetState
from tests.faults.stub_fleet import StubFleet, until_said
from tests.stub.gpus import COLLISIONS, DIRECTORY
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

POLICY, JUDGE = "policy", "judge"
EXTRA = """
sleep_group: pair
weight_transfer: {transport: disk}
check_args: false
args: {token-delay-s: 0.05}
"""


class Pair:
    """Two fleets of one group, of two servers each, as their user has them."""

    def __init__(self, directory: Path) -> None:
        self.fleet = fleet = StubFleet(directory)
        self.gpus = directory / "gpus"
        self.gpus.mkdir()
        fleet.environ[DIRECTORY] = str(self.gpus)
        for seed, name in enumerate((POLICY, JUDGE)):
            write_checkpoint(directory / f"{name}-model", tiny_tensors(seed + 1))
            fleet.write(name=name, extra=EXTRA)
            text = (directory / "fleet.yaml").read_text().replace("./model", f"./{name}-model")
            text = text.replace("drain_timeout_s: 1", "drain_timeout_s: 20")
            (directory / "fleet.yaml").rename(directory / f"{name}.yaml")
            (directory / f"{name}.yaml").write_text(text)

    def set_faults_at_start(self, name: str, fault: str, value: int) -> None:
        file = self.fleet.directory / f"{name}.yaml"
        faults = json.dumps({fault: value})
        file.write_text(file.read_text().replace("STUB_FAULTS: '{}'", f"STUB_FAULTS: '{faults}'"))

    def up(self, name: str) -> str:
        return self.run("up", "-f", f"{name}.yaml")

    def run(self, *arguments: str, expect: int = 0) -> str:
        done = self.fleet.run(*arguments, expect=expect)
        return done.stdout + done.stderr

    def refused(self, *arguments: str) -> str:
        """The message and the hint of a command that fails."""
        done = self.fleet.run(*arguments, "--json", expect=None)
        error = json.loads(done.stdout)["error"]
        assert done.returncode != 0
        return f"{error['message']} → {error['hint']}"

    def status(self, name: str) -> dict[str, Any]:
        data: dict[str, Any] = self.fleet.json("status", "--fleet", name)["data"]
        return data

    def states(self, name: str) -> list[str]:
        return [row["state"] for row in self.status(name)["replicas"]]

    def running(self, name: str) -> int:
        """Requests that its servers generate for."""
        return sum(row["running"] or 0 for row in self.status(name)["replicas"])

    def hints(self, name: str) -> list[str]:
        return [reason["hint"] for reason in self.status(name)["reasons"]]

    @property
    def collisions(self) -> str:
        record = self.gpus / COLLISIONS
        return record.read_text() if record.exists() else ""

    def client(self, name: str) -> tuple[str, dict[str, str]]:
        """The router's URL and the header with its key."""
        url = self.fleet.json("urls", "--fleet", name)["data"]["router"]
        key = self.run("urls", "--fleet", name, "--show-key").strip()
        return url, {"Authorization": f"Bearer {key}"}

    def ask(self, name: str) -> httpx.Response:
        url, headers = self.client(name)
        body = {"model": f"{name}-model", "prompt": "abc", "max_tokens": 4}
        return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=30)

    def answer(self, name: str) -> str:
        text: str = self.ask(name).raise_for_status().json()["choices"][0]["text"]
        return text


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    try:
        yield pair
    finally:
        pair.fleet.environ.pop(VARIABLE, None)
        for name in (POLICY, JUDGE):
            pair.fleet.run("down", "-f", f"{name}.yaml", "--drain-timeout", "0", expect=None)


async def _meanwhile(pair: Pair, name: str, *command: str) -> list[str]:
    """Why requests to a fleet ended that run when a command begins."""
    url, headers = await asyncio.to_thread(pair.client, name)
    body = {"model": f"{name}-model", "prompt": "abc", "max_tokens": 30}
    async with httpx.AsyncClient(timeout=60, headers=headers, trust_env=False) as http:
        posts = [http.post(f"{url}/v1/completions", json=body) for _ in range(6)]
        asking = [asyncio.create_task(post) for post in posts]
        while await asyncio.to_thread(pair.running, name) < 6:
            pass
        await asyncio.to_thread(pair.run, *command)
        answers = await asyncio.gather(*asking)
        return [a.raise_for_status().json()["choices"][0]["finish_reason"] for a in answers]


async def test_up_and_switches_cut_no_request_and_each_model_answers_as_before(
    pair: Pair,
) -> None:
    pair.up(POLICY)
    policy = pair.answer(POLICY)
    assert await _meanwhile(pair, POLICY, "up", "-f", "judge.yaml") == ["length"] * 6
    judge = pair.answer(JUDGE)
    assert judge != policy
    assert pair.ask(POLICY).status_code == 503
    assert pair.states(POLICY) == ["asleep"] * 2 and pair.hints(POLICY) == ["skyctl switch policy"]
    assert await _meanwhile(pair, JUDGE, "switch", POLICY) == ["length"] * 6
    assert pair.answer(POLICY) == policy
    assert await _meanwhile(pair, POLICY, "switch", JUDGE) == ["length"] * 6
    assert pair.answer(JUDGE) == judge
    listed = pair.fleet.json("ls")["data"]["fleets"]
    assert {(f["name"], f["state"], f["sleep_group"]) for f in listed} == {
        (POLICY, "asleep", "pair"),
        (JUDGE, "healthy", "pair"),
    }
    assert pair.status(POLICY)["sleep_group"] == {"name": "pair", "awake": JUDGE}
    assert pair.collisions == ""


def test_the_fleet_that_sleeps_refuses_what_would_load_it(pair: Pair) -> None:
    write_checkpoint(pair.fleet.directory / "next", tiny_tensors(9))
    pair.up(POLICY)
    pair.up(JUDGE)
    for command in ("wake", "sync-weights next --colocated", "restart", "scale 3"):
        words = [*command.split(), "--fleet", POLICY]
        assert "judge is awake in sleep_group pair → skyctl switch policy" in pair.refused(*words)
    assert "nothing to do" in pair.up(POLICY)
    assert pair.states(POLICY) == ["asleep"] * 2 and pair.collisions == ""


def test_a_push_and_a_switch_exclude_each_other_in_one_sentence(pair: Pair) -> None:
    write_checkpoint(pair.fleet.directory / "next", tiny_tensors(9))
    pair.up(JUDGE)
    pair.up(POLICY)
    hang = '{"/start_weight_update": {"kind": "hang"}, "/collective_rpc": {"kind": "hang"}}'
    _set_faults(pair, POLICY, hang)
    push = pair.fleet.start("sync-weights", "next", "--fleet", POLICY)
    while not pair.status(POLICY)["job"]:
        pass
    assert "fleet policy is busy: push-1" in pair.refused("switch", JUDGE)
    _set_faults(pair, POLICY, "{}")
    pair.run("jobs", "cancel", "push-1", "--fleet", POLICY)
    push.communicate(timeout=60)
    assert pair.answer(POLICY) and pair.states(JUDGE) == ["asleep"] * 2


def test_a_server_that_does_not_sleep_keeps_its_fleet_awake(pair: Pair) -> None:
    pair.up(POLICY)
    before = pair.answer(POLICY)
    _set_faults(pair, POLICY, '{"/sleep": {"kind": "status"}}', servers=1)
    assert "fleet policy stays awake, a server does not sleep: policy-0: " in pair.refused(
        "up", "-f", "judge.yaml"
    )
    assert pair.states(POLICY) == ["ready"] * 2 and pair.answer(POLICY) == before
    assert pair.status(POLICY)["sleep_group"]["awake"] == POLICY
    assert "there is no fleet named 'judge'" in pair.refused("switch", JUDGE)


def test_one_that_dies_in_its_sleep_starts_again_when_it_is_switched_to(pair: Pair) -> None:
    write_checkpoint(pair.fleet.directory / "next", tiny_tensors(9))
    pair.up(POLICY)
    pair.run("sync-weights", "next", "--fleet", POLICY, "--weight-version", "v1")
    pushed = pair.answer(POLICY)
    pair.up(JUDGE)
    before = pair.status(POLICY)
    os.kill(before["replicas"][0]["pid"], signal.SIGKILL)
    while pair.status(POLICY)["replicas"][0]["pid"]:
        pass
    os.kill(before["supervisor_pid"], signal.SIGKILL)  # nor does the next supervisor start it
    assert pair.states(POLICY) == ["asleep"] * 2
    assert [bool(row["pid"]) for row in pair.status(POLICY)["replicas"]] == [False, True]
    assert pair.hints(POLICY) == ["skyctl switch policy"]
    pair.run("switch", POLICY)
    replicas = pair.status(POLICY)["replicas"]
    assert [(r["state"], r["weight_version"]) for r in replicas] == [("ready", "v1")] * 2
    assert {pair.answer(POLICY) for _ in range(4)} == {pushed}
    assert pair.collisions == ""


def test_a_fleet_that_is_down_gives_its_gpus_to_the_next(pair: Pair) -> None:
    pair.up(POLICY)
    pair.up(JUDGE)
    pair.run("down", "--fleet", JUDGE)
    assert "skyctl up -f" in pair.refused("switch", JUDGE)
    assert pair.fleet.json("switch", POLICY, "--dry-run")["data"]["slept"] is None
    pair.run("switch", POLICY)
    assert pair.states(POLICY) == ["ready"] * 2


def test_an_up_that_fails_says_what_sleeps_and_nothing_sleeps_for_its_fleet_again(
    pair: Pair,
) -> None:
    pair.up(POLICY)
    would = pair.fleet.json("up", "-f", "judge.yaml", "--dry-run")["data"]
    assert would["sleeps"] == POLICY and pair.states(POLICY) == ["ready"] * 2
    pair.set_faults_at_start(JUDGE, "exit_at_start", 3)
    assert pair.refused("up", "-f", "judge.yaml").endswith("; policy sleeps: skyctl switch policy")
    pair.run("switch", POLICY)
    for more in ([], ["--dry-run"]):
        assert "no server of fleet judge could serve" in pair.refused("switch", JUDGE, *more)
    assert pair.states(POLICY) == ["ready"] * 2


def test_ctrl_c_in_an_up_says_what_sleeps(pair: Pair) -> None:
    pair.up(POLICY)
    pair.set_faults_at_start(JUDGE, "startup_delay_s", 30)
    up = pair.fleet.start("up", "-f", "judge.yaml")
    while pair.status(POLICY)["sleep_group"]["awake"] != JUDGE:
        pass
    until_said(up, "starting")
    up.send_signal(signal.SIGINT)
    _, said = up.communicate(timeout=60)
    assert up.returncode == 130 and "policy sleeps: skyctl switch policy" in said
    pair.run("switch", POLICY)
    assert pair.states(POLICY) == ["ready"] * 2


def test_a_fleet_whose_down_died_midway_keeps_the_gpus_until_it_is_down(pair: Pair) -> None:
    pair.up(POLICY)
    os.kill(pair.status(POLICY)["supervisor_pid"], signal.SIGKILL)
    with FleetState(pair.fleet.directory / "home/fleets/policy/state.sqlite") as state:
        state.set("going_down", "1")
    refusal = pair.refused("up", "-f", "judge.yaml")
    assert "fleet policy is not wholly down, and may use the GPUs: policy-0 (pid " in refusal
    assert refusal.endswith("→ skyctl down --fleet policy")
    pair.run("down", "--fleet", POLICY)
    pair.up(JUDGE)
    assert pair.states(JUDGE) == ["ready"] * 2 and pair.collisions == ""


@pytest.mark.parametrize("line", ["", "sleep_group: other"])
def test_a_fleet_that_has_left_the_group_is_not_put_to_sleep_for_it(pair: Pair, line: str) -> None:
    pair.up(POLICY)
    pair.run("down", "--fleet", POLICY)
    file = pair.fleet.directory / f"{POLICY}.yaml"
    moved = file.read_text().replace("sleep_group: pair", line)
    file.write_text(moved.replace("env: {", f"env: {{{DIRECTORY}: '', "))  # on GPUs of its own
    pair.up(POLICY)
    pair.up(JUDGE)
    assert pair.states(POLICY) == pair.states(JUDGE) == ["ready"] * 2
    assert pair.status(JUDGE)["sleep_group"] == {"name": "pair", "awake": JUDGE}
    group = {"name": "other", "awake": POLICY} if line else None
    assert pair.status(POLICY)["sleep_group"] == group


@pytest.mark.parametrize("point", SWITCH)
def test_a_switch_may_die_anywhere_and_the_next_completes_it(pair: Pair, point: str) -> None:
    pair.up(JUDGE)
    of_command = point in (SWITCH[0], SWITCH[-1])
    if not of_command:
        pair.fleet.environ[VARIABLE] = point  # of the supervisor that hands over
    pair.up(POLICY)
    pair.fleet.environ[VARIABLE] = point if of_command else ""
    died = pair.fleet.run("switch", JUDGE, expect=None)
    assert died.returncode != 0
    pair.fleet.environ[VARIABLE] = ""
    awake = [name for name in (POLICY, JUDGE) if "ready" in pair.states(name)]
    assert len(awake) <= 1
    for name in (POLICY, JUDGE):
        assert name in awake or pair.hints(name) == [f"skyctl switch {name}"]
    pair.run("switch", JUDGE)
    assert (pair.states(POLICY), pair.states(JUDGE)) == (["asleep"] * 2, ["ready"] * 2)
    assert pair.answer(JUDGE) and pair.collisions == ""


def _set_faults(pair: Pair, name: str, faults: str, servers: int = 2) -> None:
    data = pair.fleet.json("urls", "--fleet", name)["data"]
    token = Path(data["access"]["control_token_file"]).read_text().strip()
    for url in list(data["servers"].values())[:servers]:
        headers = {"Authorization": f"Bearer {token}", "content-type": "application/json"}
        httpx.post(f"{url}/stub/faults", content=faults, headers=headers).raise_for_status()
