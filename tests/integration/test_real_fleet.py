"""The main job, on two real vLLM CPU servers and the real router. Tests run in file order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.endpoints import (
    LONG,
    PROMPT,
    TOKENS,
    Endpoints,
    frozen_generation,
    replicas,
    wait_until,
)
from tests.integration.fleet_cli import FleetCli, greedy
from tests.integration.reference import answered
from tests.pids import abandoned, abandoned_since

pytestmark = pytest.mark.real

LARGEST_TENSOR_CHUNK = "16KiB"  # smaller than the embedding of the tiny checkpoint


@pytest.fixture(scope="module")
def endpoints(real_fleet: FleetCli) -> Endpoints:
    return Endpoints(real_fleet)


@pytest.fixture(scope="module")
def answer_a(endpoints: Endpoints) -> list[int]:
    """What the base checkpoint answers."""
    return endpoints.one_answer()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP a server's process tree for the block: what it was doing waits."""
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for process in tree:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in tree:
            process.send_signal(signal.SIGCONT)


@contextmanager
def asked_again_and_again(
    endpoints: Endpoints, name: str
) -> Iterator[tuple[set[tuple[int, ...]], set[int]]]:
    """Ask one server directly, ten times a second; its answers' tokens, and how it refused."""
    heard: set[tuple[int, ...]] = set()
    refused: set[int] = set()
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.1):
            try:
                url = endpoints.servers[name]
                heard.add(tuple(greedy(url, endpoints.model, PROMPT, key=endpoints.key)))
            except httpx.HTTPStatusError as error:
                refused.add(error.response.status_code)
            except httpx.TransportError:
                continue

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield heard, refused
    finally:
        over.set()
        asking.join()


def push(fleet: FleetCli, checkpoint: str, *options: str) -> dict[str, Any]:
    result: dict[str, Any] = fleet.data("sync-weights", f"checkpoints/{checkpoint}", *options)[
        "job"
    ]["result"]
    return result


def test_both_servers_and_the_router_answer_alike(
    real_fleet: FleetCli, endpoints: Endpoints, answer_a: list[int]
) -> None:
    assert len(endpoints.servers) == 2
    assert len(answer_a) == 24
    rows = replicas(real_fleet)
    assert {row["state"] for row in rows.values()} == {"ready"}
    assert all(row["routed"] for row in rows.values())


def test_up_again_changes_nothing(real_fleet: FleetCli) -> None:
    before = {name: row["pid"] for name, row in replicas(real_fleet).items()}
    real_fleet.run("up", timeout_s=120)
    assert {name: row["pid"] for name, row in replicas(real_fleet).items()} == before


def test_a_generation_frozen_by_pause_keep_continues_with_the_same_tokens(
    real_fleet: FleetCli, endpoints: Endpoints
) -> None:
    undisturbed = endpoints.routed(LONG)
    stream = frozen_generation(real_fleet, endpoints)
    assert not stream.grows_within(2.0)
    assert {row["state"] for row in replicas(real_fleet).values()} == {"paused"}
    real_fleet.run("resume")
    assert stream.result() == undisturbed


def test_a_push_of_the_same_checkpoint_does_not_disturb_a_frozen_generation(
    real_fleet: FleetCli, endpoints: Endpoints
) -> None:
    undisturbed = endpoints.routed(LONG)
    stream = frozen_generation(real_fleet, endpoints)
    result = push(real_fleet, "a", "--weight-version", "same-again")
    assert len(stream.tokens) < LONG
    assert {row["state"] for row in replicas(real_fleet).values()} == {"paused"}, (
        "a push must leave servers paused that were paused before it"
    )
    real_fleet.run("resume")
    assert stream.result() == undisturbed
    assert {row["version"] for row in result["servers"]} == {"same-again"}


@pytest.mark.parametrize(
    ("transport", "chunk_size"),
    [
        ("shm", "256MiB"),
        ("shm", LARGEST_TENSOR_CHUNK),
        ("shm", "100KiB"),
        ("gloo", "256MiB"),
        ("gloo", LARGEST_TENSOR_CHUNK),
        ("disk", "256MiB"),
    ],
)
def test_pushing_b_and_then_a_changes_the_answers_and_restores_them(
    real_fleet: FleetCli,
    endpoints: Endpoints,
    answer_a: list[int],
    transport: str,
    chunk_size: str,
) -> None:
    options = ("--transport", transport, "--chunk-size", chunk_size)
    to_b = push(real_fleet, "b", *options)
    answer_b = endpoints.one_answer()
    assert answer_b != answer_a
    versions = {row["weight_version"] for row in replicas(real_fleet).values()}
    assert versions == {to_b["version"]}
    if chunk_size == LARGEST_TENSOR_CHUNK:
        assert to_b["chunks"] > 10

    to_a = push(real_fleet, "a", *options)
    assert endpoints.one_answer() == answer_a
    digests = {row["weights_digest"] for row in to_a["servers"]}
    assert len(digests) == 1
    assert digests.isdisjoint({row["weights_digest"] for row in to_b["servers"]})
    real_fleet.run("weights", "verify")


def test_a_rollback_brings_the_version_before_and_another_one_the_last_back(
    real_fleet: FleetCli, endpoints: Endpoints, answer_a: list[int]
) -> None:
    before = real_fleet.data("sync-weights", "checkpoints/b", "--weight-version", "to-leave")
    assert before["job"]["state"] == "succeeded"
    back = real_fleet.data("sync-weights", "--rollback")["job"]["result"]
    assert Path(back["checkpoint"]).name == "a"
    assert endpoints.one_answer() == answer_a
    again = real_fleet.data("sync-weights", "--rollback")["job"]["result"]
    assert again["version"] == "to-leave"
    assert endpoints.one_answer() != answer_a
    first = real_fleet.data("sync-weights", "--rollback", "base")["job"]["result"]
    assert Path(first["checkpoint"]).name == "a"
    assert endpoints.one_answer() == answer_a


# each of the checkpoints in pieces, as a trainer writes it, once it is told to go on
WRITER = """
import sys, time
from pathlib import Path
runs, *sources = map(Path, sys.argv[1:])
for step, source in enumerate(sources, start=1):
    path = runs / f"checkpoint-{step}"
    path.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        data = file.read_bytes()
        with (path / file.name).open("wb", buffering=0) as out:
            for at in range(0, len(data), 1 + len(data) // 3):
                out.write(data[at : at + 1 + len(data) // 3])
                time.sleep(0.1)
    sys.stdin.readline()
"""


def test_a_watch_pushes_each_checkpoint_once_its_writer_has_finished_it(
    real_fleet: FleetCli, endpoints: Endpoints, answer_a: list[int], tmp_path: Path
) -> None:
    runs, sources = tmp_path / "runs", real_fleet.directory / "checkpoints"
    runs.mkdir()
    writing = [sys.executable, "-c", WRITER, str(runs), str(sources / "b"), str(sources / "a")]
    with (
        real_fleet.start("sync-weights", "--watch", str(runs), "--json") as watch,
        subprocess.Popen(writing, stdin=subprocess.PIPE, text=True) as writer,
    ):
        try:
            assert watch.stdout is not None and writer.stdin is not None
            for step, name in ((1, "b"), (2, "a")):
                envelope = json.loads(watch.stdout.readline())
                version = envelope["data"]["job"]["result"]["version"]
                assert version.partition("@")[0] == f"checkpoint-{step}"
                expected = answered(sources / name, PROMPT, TOKENS)
                assert list(endpoints.answers(TOKENS).values()) == [expected] * 3
                writer.stdin.write("\n")
                writer.stdin.flush()
            watch.send_signal(signal.SIGINT)
            assert watch.wait(60) == 0
        except BaseException:
            watch.kill()
            writer.kill()
            raise
    assert endpoints.one_answer() == answer_a


def test_sleep_and_wake(real_fleet: FleetCli, endpoints: Endpoints, answer_a: list[int]) -> None:
    slept = real_fleet.run("sleep", "--level", "1")
    assert "no memory" in slept.stderr + slept.stdout
    assert {row["state"] for row in replicas(real_fleet).values()} == {"asleep"}
    refused = real_fleet.json("sync-weights", "checkpoints/b", expect=1)
    assert "skyctl wake" in refused["error"]["hint"] + refused["error"]["message"]
    real_fleet.run("wake")
    assert {row["state"] for row in replicas(real_fleet).values()} == {"ready"}
    assert endpoints.one_answer() == answer_a


def test_a_killed_cli_does_not_end_the_push_and_a_second_push_is_refused(
    real_fleet: FleetCli, endpoints: Endpoints, answer_a: list[int]
) -> None:
    first_replica = next(iter(replicas(real_fleet).values()))
    jobs_before = {job["id"] for job in real_fleet.data("jobs")["jobs"]}
    with stopped(first_replica["pid"]):
        cli = real_fleet.start("sync-weights", "checkpoints/b", "--weight-version", "survivor")

        def new_jobs() -> list[dict[str, Any]]:
            jobs = real_fleet.data("jobs")["jobs"]
            return [job for job in jobs if job["id"] not in jobs_before]

        wait_until(lambda: bool(new_jobs()), 30, "the push's job is listed")
        refused = real_fleet.json("sync-weights", "checkpoints/a", expect=1)
        cli.kill()
        cli.communicate(timeout=10)
    job = new_jobs()[0]
    assert refused["error"]["kind"] == "ConflictError"
    assert str(job["id"]) in refused["error"]["message"]
    real_fleet.run("jobs", "wait", str(job["id"]))
    versions = {row["weight_version"] for row in replicas(real_fleet).values()}
    assert versions == {"survivor"}
    assert endpoints.one_answer() != answer_a


def test_a_killed_replica_returns_at_the_current_version_and_is_routed_again(
    real_fleet: FleetCli, endpoints: Endpoints, answer_a: list[int]
) -> None:
    name, row = next(iter(replicas(real_fleet).items()))
    assert row["weight_version"] == "survivor"
    answer_b = endpoints.one_answer()
    assert answer_b != answer_a
    os.kill(row["pid"], signal.SIGKILL)

    with asked_again_and_again(endpoints, name) as (heard, refused):
        wait_until(
            lambda: replicas(real_fleet)[name]["state"] != "ready", 60, "the death to be noticed"
        )
        while_down = endpoints.routed()
        assert while_down == answer_b, "the other replica goes on answering"
        wait_until(
            lambda: (
                replicas(real_fleet)[name]["state"] == "ready"
                and replicas(real_fleet)[name]["routed"]
            ),
            240,
            "the replica to be back in the router",
        )
        wait_until(lambda: bool(heard), 30, "the replica to answer who asks it directly")
    assert heard == {tuple(answer_b)}, "it was started from a"
    assert refused == {503}
    again = replicas(real_fleet)[name]
    assert again["pid"] != row["pid"]
    assert again["weight_version"] == "survivor"
    assert endpoints.one_answer() == answer_b


def test_a_dead_engine_core_is_seen_by_who_asks_at_once(real_fleet: FleetCli) -> None:
    name, row = next(iter(replicas(real_fleet).items()))
    children = psutil.Process(row["pid"]).children()
    core = max(children, key=lambda child: child.memory_info().rss)  # the other tracks resources
    core.kill()
    time.sleep(1.0)
    told = real_fleet.json("status", "--exit-code", expect=1)["data"]
    assert {r["name"]: r["state"] for r in told["replicas"]}[name] != "ready"
    assert any(reason["message"].startswith(name) for reason in told["reasons"])
    real_fleet.run("wait", "--for", "ready", "--timeout", "240", timeout_s=300)
    again = replicas(real_fleet)[name]
    assert again["restarts"] >= 1 and again["restart_reason"]


def test_another_directory_finds_the_fleet_by_name(real_fleet: FleetCli, tmp_path: Path) -> None:
    elsewhere = FleetCli(tmp_path, real_fleet.home)
    assert elsewhere.data("status", "--fleet", "tiny")["name"] == "tiny"
    refused = elsewhere.json("status", "--fleet", "nonesuch", expect=4)
    assert "tiny" in refused["error"]["message"] + refused["error"]["hint"]


def test_generate_runs_a_file_of_prompts_through_the_router(
    real_fleet: FleetCli, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "number {n} is"}}\n' for n in range(6)))
    answers = tmp_path / "answers.jsonl"
    real_fleet.run(
        "generate", "--input", str(prompts), "--output", str(answers), "--max-tokens", "8"
    )
    assert len(answers.read_text().splitlines()) == 6


def test_down_leaves_nothing(real_fleet: FleetCli, endpoints: Endpoints) -> None:
    status = real_fleet.data("status")
    pids = [row["pid"] for row in status["replicas"]] + [status["router"]["pid"]]
    family = [p for pid in pids for p in psutil.Process(pid).children(recursive=True)]
    family += [psutil.Process(pid) for pid in pids]
    abandoned_before = abandoned()
    ports = {int(url.rsplit(":", 1)[1]) for url in endpoints.servers.values()}
    assert ports <= listening(real_fleet)

    real_fleet.run("down")

    assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert listening(real_fleet) == set()
    assert abandoned_since(abandoned_before) == set()
    real_fleet.run("down")
    refused = real_fleet.json("pause", expect=4)
    assert "skyctl up" in refused["error"]["hint"]


def listening(fleet: FleetCli) -> set[int]:
    """The ports of all processes that a fleet's commands and its supervisor have started."""
    ports: set[int] = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get("SKYCTL_HOME") == str(fleet.home):
                connections = process.net_connections("tcp")
                ports |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
    return ports
