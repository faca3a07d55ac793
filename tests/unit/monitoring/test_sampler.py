"""One look after another at a fleet: what the sampler makes of statuses and metrics pages."""

from __future__ import annotations

import os
from typing import Any

import httpx

from skyctl.core.status import ReplicaStatus, TinkerStatus
from skyctl.http.client import ControlClient
from skyctl.launch.local.devices import GpuUsage
from skyctl.monitoring.sampler import Sampler
from skyctl.monitoring.samples import TinkerSample
from skyctl.states import ReplicaState
from skyctl.store.journal import Job, JobState
from tests.stub.through_httpx import ThroughHttpx
from tests.unit.monitoring.fleets import ToldFleet, replica, status


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def sampler(fleet: ToldFleet, clock: Clock, pages: list[str] | None = None) -> Sampler:
    """A sampler whose router answers these metrics pages, one per look."""
    remaining = list(pages or [])

    def answer(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://127.0.0.1:3/metrics"
        return httpx.Response(200, text=remaining.pop(0)) if remaining else httpx.Response(500)

    client = ControlClient(transport=ThroughHttpx(httpx.MockTransport(answer)))
    usage = {1: GpuUsage(1, 0.9, 8, 10)}
    return Sampler(fleet, client=client, clock=clock, read_gpus=lambda: usage)  # type: ignore[arg-type]


def counters(prompt: int, generated: int, queries: int, hits: int) -> ReplicaStatus:
    return replica(
        prompt_tokens=prompt,
        generation_tokens=generated,
        prefix_cache_queries=queries,
        prefix_cache_hits=hits,
    )


async def test_rates_are_between_two_looks() -> None:
    clock = Clock()
    fleet = ToldFleet(status(counters(0, 100, 10, 0)), status(counters(50, 500, 20, 5)))
    async with sampler(fleet, clock) as looks:
        first = await looks.sample()
        clock.now += 2.0
        second = await looks.sample()
    assert first.interval_s is None and second.interval_s == 2.0
    assert first.replicas[0].generation_tokens_per_s is None
    [sample] = second.replicas
    assert (sample.prompt_tokens_per_s, sample.generation_tokens_per_s) == (25.0, 200.0)
    assert sample.prefix_hit_rate == 0.5


async def test_only_the_first_look_makes_servers_say_whether_they_are_paused() -> None:
    fleet = ToldFleet(status(replica()))
    async with sampler(fleet, Clock()) as looks:
        for _ in range(3):
            await looks.sample()
    assert fleet.asked_fresh == [True, False, False]


async def test_the_hit_rate_of_an_idle_server_is_its_last_one() -> None:
    clock = Clock()
    fleet = ToldFleet(
        *(status(counters(0, 0, queries, hits)) for queries, hits in ((10, 0), (20, 5), (20, 5)))
    )
    async with sampler(fleet, clock) as looks:
        for _ in range(3):
            sample = await looks.sample()
            clock.now += 1.0
    assert sample.replicas[0].prefix_hit_rate == 0.5


async def test_the_routers_page_gives_its_rates_and_the_tinker_api_is_beside_it() -> None:
    clock = Clock()
    pages = [
        'vllm_router_requests_total{route="/v1/completions"} 10\n',
        'vllm_router_requests_total{route="/v1/completions"} 30\n'
        'vllm_router_request_errors_total{route="/v1/completions"} 1\n',
    ]
    api = TinkerStatus(
        ReplicaState.STARTING,
        "http://127.0.0.1:3",
        rss_bytes=7,
        models=2,
        operation="save",
        operation_s=1.5,
    )
    async with sampler(ToldFleet(status(replica(), tinker=api)), clock, pages) as looks:
        await looks.sample()
        clock.now += 2.0
        sample = await looks.sample()
        silent = (await looks.sample()).router
    router = sample.router
    assert sample.tinker == TinkerSample("starting", None, 7, 2, "save", 1.5)
    assert router is not None and silent is not None
    assert (router.requests, router.requests_per_s, router.errors_per_s) == (30, 10.0, 0.5)
    assert (silent.state, silent.requests, silent.requests_per_s) == ("ready", None, None)


async def test_time_in_state_is_the_supervisors_or_counted_from_first_sight() -> None:
    clock = Clock()
    fleet = ToldFleet(status(replica(state="paused", state_s=77.0)))
    async with sampler(fleet, clock) as looks:
        assert (await looks.sample()).replicas[0].state_s == 77.0
    attached = ToldFleet(
        status(replica(), supervised=None),
        status(replica(), supervised=None),
        status(replica(state="paused"), supervised=None),
    )
    async with sampler(attached, clock) as looks:
        seconds = []
        for _ in range(3):
            seconds.append((await looks.sample()).replicas[0].state_s)
            clock.now += 3.0
    assert seconds == [0.0, 3.0, 0.0]


async def test_gpus_are_those_the_replica_runs_on_and_looked_at_seldom() -> None:
    clock = Clock()
    looked = 0

    def read() -> dict[int, GpuUsage]:
        nonlocal looked
        looked += 1
        return {1: GpuUsage(1, 0.9, 8, 10), 2: GpuUsage(2, 0.1, 8, 10)}

    looks = sampler(ToldFleet(status(replica(gpus=(1,)))), clock)
    looks._read_gpus = read
    async with looks:
        for _ in range(4):
            sample = await looks.sample()
            clock.now += 0.5
    assert [gpu.index for gpu in sample.replicas[0].gpus] == [1]
    assert looked == 1


async def test_the_pid_and_gpus_of_another_machine_are_not_looked_for_here() -> None:
    fleet_status = status(
        replica(pid=os.getpid(), gpus=(1,), rss_bytes=7, node="me@far"),
        replica(pid=os.getpid(), gpus=(1,)),
    )
    async with sampler(ToldFleet(fleet_status), Clock()) as looks:
        far, near = (await looks.sample()).replicas
    assert (far.rss_bytes, far.gpus) == (7, ())
    assert near.rss_bytes and near.rss_bytes > 7 and [gpu.index for gpu in near.gpus] == [1]


async def test_the_push_in_progress_is_shown_with_how_far_it_is() -> None:
    request: dict[str, Any] = {"checkpoint": "runs/step-200"}
    job = Job("push-3", "push", JobState.RUNNING, "update", 5, 10, request, {}, created_at=0.0)
    for supervised in (True, None):
        fleet = ToldFleet(status(replica(), job="push-3", supervised=supervised), job=job)
        async with sampler(fleet, Clock()) as looks:
            job_sample = (await looks.sample()).job
        assert job_sample is not None
        assert (job_sample.id, job_sample.stage, job_sample.done_bytes) == ("push-3", "update", 5)
    async with sampler(ToldFleet(status(replica()), job=job), Clock()) as looks:
        assert (await looks.sample()).job is None
