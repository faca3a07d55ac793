"""A push, a roll or a change of adapters is cancelled at each of its stages: it ends as the failure
matrix says, and the fleet takes the next push at once. `SKYCTL_TEST_CANCELS=20` repeats each, at
other moments of its stage.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from skyctl.core.requests import CancelJob, StatusQuery
from skyctl.store.journal import Job
from skyctl.store.paths import FleetPaths
from skyctl.supervisor.interface import SupervisorClient
from tests.faults.stub_fleet import StubFleet, versions
from tests.pids import gone
from tests.unit.adapters.files import lora, make_adapter
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

TIMES = int(os.environ.get("SKYCTL_TEST_CANCELS", "1"))
SLOW_S = 0.2
ROUTES = (
    "/pause", "/resume", "/collective_rpc", "/init_weight_transfer_engine", "/start_weight_update",
    "/update_weights", "/finish_weight_update", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
)  # fmt: skip
MODULE = "base_model.model.model.layers.0.mlp.up_proj"
EXTRA = """auth: none
lora: {{}}
args: {{max-model-len: {length}}}
router: {{policy: {policy}}}
"""

Seen = Callable[[SupervisorClient, Job], Awaitable[bool]]


class Changed:
    """A fleet of stubs, and how many changes were cancelled as what."""

    def __init__(self, directory: Path) -> None:
        self.dice = random.Random(os.environ.get("SKYCTL_TEST_SEED", "7"))
        self.stubs = StubFleet(directory)
        self.outcomes: Counter[str] = Counter()
        self.number = 0
        for name in ("even", "odd"):
            write_checkpoint(directory / name, tiny_tensors(2 if name == "even" else 3))
        for number in (1, 2):
            make_adapter(directory / f"adapter{number}", lora(MODULE), value=number / 10)
        self.write()
        write_checkpoint(directory / "model", tiny_tensors(1))
        (directory / "trial.yaml").write_text("- {prompt: ab, expect: {min_logprob: -1.0}}\n")
        self.stubs.run("up")
        self.push()

    def write(self, replicas: int = 2, length: int = 1024, policy: str = "round_robin") -> None:
        extra = EXTRA.format(length=length, policy=policy)
        self.stubs.write(replicas, '{"startup_delay_s": 0.3}', extra)
        write_checkpoint(self.stubs.directory / "model", tiny_tensors(1))

    def push(self, *options: str) -> str:
        """The next push, which nothing hinders; its version."""
        self.number += 1
        directory = "even" if self.number % 2 else "odd"
        self.stubs.run("sync-weights", directory, "--weight-version", f"v{self.number}", *options)
        assert versions(self.stubs) == {f"v{self.number}"}
        return f"v{self.number}"

    def slow(self, seconds: float) -> None:
        fault = {"kind": "delay", "seconds": seconds}
        faults = dict.fromkeys(ROUTES, fault) if seconds else {}
        for url in self.urls():
            httpx.post(f"{url}/stub/faults", json=faults).raise_for_status()

    def urls(self) -> list[str]:
        return [row["url"] for row in self.stubs.replicas().values()]

    def adapters(self) -> list[dict[str, str]]:
        """Directory by name, of each server, as the server says."""
        models = [httpx.get(f"{url}/v1/models").json()["data"] for url in self.urls()]
        return [{card["id"]: card["root"] for card in cards if card["parent"]} for cards in models]

    def cancel(
        self, change: subprocess.Popen[str], kind: str, seen: Seen, within_s: float = SLOW_S
    ) -> str:
        """Cancel the change that a command follows, a moment after what is to be seen. Returns its
        job's id, "" if it ended before anything was seen.
        """
        return asyncio.run(self._cancel(change, kind, seen, within_s))

    async def _cancel(
        self, change: subprocess.Popen[str], kind: str, seen: Seen, within_s: float
    ) -> str:
        paths = FleetPaths(self.stubs.directory / "home", "stubs")
        async with SupervisorClient.on_this_machine(paths) as client:
            while change.poll() is None:
                for job in await client.jobs():
                    if job.kind == kind and not job.ended and await seen(client, job):
                        await asyncio.sleep(self.dice.uniform(0, within_s))
                        await client.cancel_job(CancelJob(job.id))
                        return job.id
                await asyncio.sleep(0.005)
        self.outcomes["not seen in time"] += 1
        return ""


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changed]:
    changed = Changed(tmp_path_factory.mktemp("changed"))
    yield changed
    changed.stubs.run("down", "--drain-timeout", "0")
    print(dict(changed.outcomes))


UNDONE = ("queued", "preflight", "stage", "drain", "pause", "init", "start")
COMPLETED = ("finish", "verify", "trial", "resume")
OPTIONS = {
    "queued": ["--keep"],
    "drain": ["--rolling", "1"],
    "trial": ["--trial", "trial.yaml"],
}


@pytest.mark.parametrize("stage", [*UNDONE, "update", *COMPLETED])
def test_a_push_is_undone_or_completes(changed: Changed, stage: str) -> None:
    async def seen(client: SupervisorClient, job: Job) -> bool:
        return job.stage == stage or stage == "queued"

    done = 0
    while done < TIMES:
        before = versions(changed.stubs)
        changed.slow(SLOW_S)
        options = OPTIONS.get(stage, ())
        push = changed.stubs.start("sync-weights", "even", "--weight-version", "new", *options)
        if not (job := changed.cancel(push, "push", seen)):
            continue
        changed.stubs.run("jobs", "cancel", job)
        shown = changed.stubs.json("jobs", "show", job)["data"]
        push.communicate(timeout=30)
        changed.slow(0)
        state, stages = shown["job"]["state"], {row["name"] for row in shown["timeline"]["stages"]}
        assert versions(changed.stubs) == ({"new"} if state == "succeeded" else before)
        assert state == "succeeded" if stage in COMPLETED else state in ("interrupted", "succeeded")
        assert state == "interrupted" or "update" in stages
        changed.outcomes[f"push, {stage}: {state}"] += 1
        changed.push()
        done += 1


async def replica(client: SupervisorClient, name: str) -> tuple[str, bool]:
    """Its state, and whether it is routed to."""
    status = await client.status(StatusQuery(fresh=False))
    rows = {row.name: row for row in status.replicas}
    row = rows.get(name)
    return (row.state, bool(row.routed)) if row else ("", False)


async def new_one_starts(client: SupervisorClient) -> bool:
    return (await replica(client, "stubs-2"))[0] == "starting"


async def first_leaves(client: SupervisorClient) -> bool:
    return await replica(client, "stubs-0") == ("ready", False)


async def first_starts(client: SupervisorClient) -> bool:
    return (await replica(client, "stubs-0"))[0] == "starting"


async def second_starts(client: SupervisorClient) -> bool:
    return (await replica(client, "stubs-1"))[0] == "starting"


async def router_changes(client: SupervisorClient) -> bool:
    status = await client.status(StatusQuery(fresh=False))
    return status.router is None or status.router.state != "ready"


async def second_leaves(client: SupervisorClient) -> bool:
    return await replica(client, "stubs-1") != ("ready", True)


ROLLS: dict[str, tuple[dict[str, Any], Callable[[SupervisorClient], Awaitable[bool]]]] = {
    "a new server starts": ({"replicas": 3}, new_one_starts),
    "the first is drained": ({"length": 2048}, first_leaves),
    "the first starts": ({"length": 2048}, first_starts),
    "the second starts": ({"length": 2048}, second_starts),
    "the router is replaced": ({"policy": "random"}, router_changes),
    "one is removed": ({"replicas": 1}, second_leaves),
}
SHORT = ("the router is replaced", "one is removed")


@pytest.mark.parametrize("stage", ROLLS)
def test_a_roll_is_put_back_and_up_goes_on_with_it(changed: Changed, stage: str) -> None:
    change, now = ROLLS[stage]

    async def seen(client: SupervisorClient, job: Job) -> bool:
        return await now(client)

    stubs = changed.stubs
    done = 0
    while done < TIMES:
        changed.write()
        stubs.run("up")
        before = {name: row["pid"] for name, row in stubs.replicas().items()}
        changed.write(**change)
        up = stubs.start("up")
        if not (job := changed.cancel(up, "up", seen, 0.1 if stage in SHORT else 0.6)):
            continue
        ended = stubs.json("jobs", "cancel", job)["data"]["job"]
        _, notes = up.communicate(timeout=30)
        status = stubs.json("status")["data"]
        assert {(row["state"], row["routed"]) for row in status["replicas"]} == {("ready", True)}
        assert status["router"]["state"] == "ready"
        interrupted = ended["state"] == "interrupted"
        assert interrupted or ended["state"] == "succeeded"
        assert (up.returncode, "was cancelled by" in notes) == (int(interrupted), interrupted)
        removed = before.keys() - {row["name"] for row in status["replicas"]}
        asked = 2 - change.get("replicas", 2)
        # a removal that was complete when the cancellation came stays
        assert len(removed) in ({0, asked} if interrupted else {asked})
        assert all(gone(before[name]) for name in removed)
        changed.outcomes[f"up, {stage}: {ended['state']}"] += 1
        changed.push()
        stubs.run("up")  # goes on
        assert stubs.run("up").stderr.count("nothing to do") == 1
        done += 1
    changed.write()
    stubs.run("up")


@pytest.mark.parametrize(("verb", "calls"), [("sync", 3), ("load", 3), ("unload", 1)])
def test_a_change_of_adapters_is_undone_on_all_servers(
    changed: Changed, verb: str, calls: int
) -> None:
    async def seen(client: SupervisorClient, job: Job) -> bool:
        return True

    stubs = changed.stubs
    done = 0
    while done < TIMES:
        if changed.adapters()[0] and verb == "load":
            stubs.run("adapters", "unload", "math")
        elif not changed.adapters()[0] and verb != "load":
            stubs.run("adapters", "load", "math", "adapter1")
        before = changed.adapters()
        changed.slow(SLOW_S)
        words = ["math"] if verb == "unload" else ["math", "adapter2"]
        change = stubs.start("adapters", verb, *words)
        job = changed.cancel(change, "adapters", seen, calls * SLOW_S)
        if not job:
            continue
        ended = stubs.json("jobs", "cancel", job)["data"]["job"]
        _, notes = change.communicate(timeout=30)
        changed.slow(0)
        after, state = changed.adapters(), ended["state"]
        assert change.returncode == (0 if state == "succeeded" else 1), notes
        assert (after == before) is (state == "interrupted")
        assert after[0] == after[1]
        changed.outcomes[f"adapters {verb}: {state}"] += 1
        changed.push()
        done += 1
