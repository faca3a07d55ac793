"""A supervisor in the test's own process, over stub servers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from skyctl.core.plan import FleetPlan, ServerSpec
from skyctl.core.requests import Down
from skyctl.http.client import ControlClient
from skyctl.launch.local.host import free_port
from skyctl.push.request import PushRequest
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from skyctl.supervisor.resident import Supervisor
from tests.unit.supervisor.fleets import ROOT, eventually

PROMPT, TOKENS = "ab", 6


@asynccontextmanager
async def supervising(
    tmp_path: Path, kind: type[FleetState] = FleetState, **options: Any
) -> AsyncIterator[Supervisor]:
    """A supervisor whose fleet is brought down at the end, whatever happened; its state is a `kind`
    with these `options`."""
    paths = FleetPaths(tmp_path, "stubs").prepare()
    async with ControlClient() as client:
        with kind(paths.database, **options) as state:
            supervisor = Supervisor(paths, state, client)
            try:
                yield supervisor
            finally:
                await supervisor.down(Down(0.0))


async def ended(supervisor: Supervisor) -> str:
    """The error of the operation in progress, once it has ended."""
    await eventually(
        lambda: supervisor.operation is not None and supervisor.operation.ended_at is not None
    )
    assert supervisor.operation is not None
    return supervisor.operation.error


async def bring_up(supervisor: Supervisor, plan: FleetPlan) -> None:
    supervisor.change_to(plan)
    assert await ended(supervisor) == ""


def pid_of(supervisor: Supervisor, name: str) -> int:
    process = supervisor.replicas[name].process
    assert process is not None and process.pid is not None
    return process.pid


def states(supervisor: Supervisor) -> dict[str, str]:
    return {name: replica.state for name, replica in supervisor.replicas.items()}


def routed(supervisor: Supervisor) -> set[str]:
    assert supervisor.router is not None
    return {n for n, r in supervisor.replicas.items() if r.spec.url in supervisor.router.workers}


def full_server(name: str, *options: str) -> ServerSpec:
    """A stub that takes faults, sleeps and answers requests, which the light one does not."""
    port = free_port("127.0.0.1")
    argv = (sys.executable, "-m", "tests.stub.server", "--port", str(port), *options)
    return ServerSpec(name, argv, {"PYTHONPATH": str(ROOT)}, "127.0.0.1", port)


def pushable(name: str, model: Path, draft: Path | None = None) -> ServerSpec:
    """A stub that takes pushes, runs the checkpoint `model` and drafts with `draft`."""
    drafts = {"method": "eagle3", "model": str(draft)} if draft else {}
    options = (
        *("--model", str(model), "--served-model-name", "stub-model"),
        *("--speculative-config", json.dumps(drafts)),
    )
    transfer = ("--weight-transfer-config", json.dumps({"backend": "skyctl"}))
    return replace(full_server(name, *options, *transfer), backend="skyctl")


async def stub_state(supervisor: Supervisor, name: str) -> dict[str, Any]:
    async with httpx.AsyncClient() as client:
        url = supervisor.replicas[name].spec.url
        state: dict[str, Any] = (await client.get(f"{url}/stub/state")).json()
    return state


async def set_faults(supervisor: Supervisor, name: str, faults: dict[str, Any]) -> None:
    async with httpx.AsyncClient() as client:
        await client.post(f"{supervisor.replicas[name].spec.url}/stub/faults", json=faults)


async def pushed(supervisor: Supervisor, checkpoint: Path, draft: str = "") -> None:
    before, router = (states(supervisor), routed(supervisor)), supervisor.router
    job = await supervisor.start_push(PushRequest(str(checkpoint), draft=draft))
    await eventually(lambda: supervisor.push_job is None)
    assert supervisor.state.journal.job(job).state == "succeeded"
    assert router is not None
    # one is seen to be resumed before the other, and routed to alone meanwhile
    await eventually(
        lambda: (states(supervisor), routed(supervisor)) == before and not router._syncing.locked()
    )


class Client:
    """Asks the router again and again; `answers` by text, `failures` by status."""

    def __init__(self, supervisor: Supervisor) -> None:
        assert supervisor.router is not None
        self._url = supervisor.router.spec.url
        self.answers: list[str] = []
        self.failures: list[int] = []

    async def ask(self, until: asyncio.Event) -> None:
        body = {"model": "stub-model", "prompt": PROMPT, "max_tokens": TOKENS}
        async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
            while not until.is_set():
                answer = await http.post(f"{self._url}/v1/completions", json=body)
                if answer.status_code == 200:
                    self.answers.append(answer.json()["choices"][0]["text"])
                else:
                    self.failures.append(answer.status_code)
                await asyncio.sleep(0.01)


@asynccontextmanager
async def asking(supervisor: Supervisor, clients: int = 2) -> AsyncIterator[Client]:
    client, over = Client(supervisor), asyncio.Event()
    tasks = [asyncio.create_task(client.ask(over)) for _ in range(clients)]
    try:
        yield client
    finally:
        over.set()
        await asyncio.gather(*tasks)
