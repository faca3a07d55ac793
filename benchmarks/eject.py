"""One of N replicas is lost behind the real vllm-router, under load: how soon it is ejected, and
what requests come to before and after that.

    python -m benchmarks.eject [--replicas 4] [--rounds 5] [--result FILE]       on stubs
    python -m benchmarks.eject --fleet tiny [--rounds 1]              on a fleet that is up

The supervisor and the router are the real ones, with the defaults of the fleet file. A replica is
killed (SIGKILL) while clients ask without a pause; ejected is the moment from which the router no
longer lists it. Requests are counted by when they were sent: before the kill, from the kill to the
ejection, after it, and after the replica is back. A request is not repeated by the client; what the
router repeats counts as one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from skyctl.core.registry import FleetRef, select
from skyctl.core.status import FleetStatus
from skyctl.core.urls import api_key
from skyctl.service import connect
from tests.faults.stub_fleet import StubFleet

RESULT = Path(__file__).parent / "results" / "eject.json"
# as tests/faults/stub_fleet.py has it, but for the router, which is the real one
_INTERPRETER = """#!/bin/sh
case "$2" in vllm_router*) exec {python} "$@" ;; esac
exec {stand_in} "$@"
"""
POLL_S = 0.02
REQUEST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Asked:
    """One request: when it was sent and answered (monotonic seconds), and why it failed."""

    sent: float
    answered: float
    error: str


@contextmanager
def stub_fleet(directory: Path, replicas: int) -> Iterator[FleetRef]:
    """A fleet of stubs behind the real router, with the defaults for health and restarts."""
    fleet = StubFleet(directory)
    fleet.write(replicas=replicas)
    stand_in = (directory / "python").rename(directory / "stand-in")
    (directory / "python").write_text(_INTERPRETER.format(python=sys.executable, stand_in=stand_in))
    (directory / "python").chmod(0o755)
    (directory / "fleet.yaml").write_text(
        "name: stubs\nmodel: ./model\npython: ./python\ndevice: cpu\n"
        f"replicas: {replicas}\nargs: {{token-delay-s: 0.005}}\n"
    )
    os.environ["SKYCTL_HOME"] = str(directory / "home")
    fleet.run("up")
    try:
        yield select([directory / "fleet.yaml"], None)
    finally:
        fleet.run("down", "--drain-timeout", "0")


async def status_of(ref: FleetRef) -> FleetStatus:
    async with connect(ref) as fleet:
        return await fleet.status()


class Load:
    """Clients that ask one after the other until they are told to stop."""

    def __init__(self, url: str, model: str, headers: dict[str, str]) -> None:
        self.asked: list[Asked] = []
        self._client = httpx.AsyncClient(
            base_url=url, headers=headers, timeout=REQUEST_TIMEOUT_S, trust_env=False
        )
        self._body = {"model": model, "max_tokens": 8, "temperature": 0}
        self._over = asyncio.Event()

    @asynccontextmanager
    async def running(self, clients: int) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._ask(number)) for number in range(clients)]
        try:
            yield
        finally:
            self._over.set()
            await asyncio.gather(*tasks)
            await self._client.aclose()

    async def _ask(self, number: int) -> None:
        count = 0
        while not self._over.is_set():
            count += 1
            body = {**self._body, "prompt": f"client {number} request {count}"}
            sent, error = time.monotonic(), ""
            try:
                answer = await self._client.post("/v1/completions", json=body)
                if answer.status_code != 200:
                    error = f"{answer.status_code}: {answer.text[:80]}"
            except httpx.HTTPError as failure:
                error = repr(failure)[:80]
            self.asked.append(Asked(sent, time.monotonic(), error))


async def round_of(ref: FleetRef, dice: random.Random, *, clients: int, warm_s: float) -> Any:
    """One replica killed under load; times in seconds from the kill."""
    status = await status_of(ref)
    assert status.router is not None and status.router.url is not None
    victim = dice.choice(status.replicas)
    assert victim.pid is not None
    async with connect(ref) as fleet:
        urls = await fleet.urls()
        key = api_key(urls.access)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    router_url = status.router.url
    load = Load(router_url, urls.model or "", headers)
    async with load.running(clients), httpx.AsyncClient(trust_env=False, timeout=10) as router:

        async def until(listed: bool) -> float:
            while True:
                answer = await router.get(f"{router_url}/list_workers", headers=headers)
                if (victim.url in answer.text) is listed:
                    return time.monotonic()
                await asyncio.sleep(POLL_S)

        await asyncio.sleep(warm_s)
        killed = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        ejected = await until(listed=False)
        back = await until(listed=True)
        await asyncio.sleep(warm_s)
    return {
        "replica": victim.name,
        "ejected_s": round(ejected - killed, 3),
        "back_s": round(back - killed, 3),
        "last_failure_sent_s": _last_failure(load.asked, killed),
        "longest_request_s": round(max(a.answered - a.sent for a in load.asked), 3),
        "requests": {
            name: _counts([a for a in load.asked if begins <= a.sent < ends])
            for name, begins, ends in (
                ("before the kill", 0.0, killed),
                ("until ejected", killed, ejected),
                ("after the ejection", ejected, back),
                ("after its return", back, float("inf")),
            )
        },
        "errors": sorted({a.error for a in load.asked if a.error}),
    }


def _counts(asked: list[Asked]) -> dict[str, int]:
    return {"sent": len(asked), "failed": sum(bool(a.error) for a in asked)}


def _last_failure(asked: list[Asked], killed: float) -> float | None:
    sent = [a.sent - killed for a in asked if a.error]
    return round(max(sent), 3) if sent else None


async def measure(ref: FleetRef, rounds: int, *, clients: int, warm_s: float) -> dict[str, Any]:
    dice = random.Random(0)
    replicas = len((await status_of(ref)).replicas)
    found = [await round_of(ref, dice, clients=clients, warm_s=warm_s) for _ in range(rounds)]
    after = [row["requests"]["after the ejection"] for row in found]
    after += [row["requests"]["after its return"] for row in found]
    sent, failed = (sum(row[key] for row in after) for key in ("sent", "failed"))
    return {
        "replicas": replicas,
        "clients": clients,
        "rounds": found,
        "ejected_s_worst": max(row["ejected_s"] for row in found),
        "sent_after_ejection": sent,
        "failed_after_ejection": failed,
        "failed_after_ejection_percent": round(100 * failed / sent, 3) if sent else None,
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eject")
    parser.add_argument("--replicas", type=int, default=4, help="stubs to start")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--warm-seconds", type=float, default=3.0)
    parser.add_argument("--fleet", help="a fleet that is up, by name")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    how = {"clients": options.clients, "warm_s": options.warm_seconds}
    if options.fleet:
        result = asyncio.run(measure(select(None, options.fleet), options.rounds, **how))
    else:
        with (
            tempfile.TemporaryDirectory(prefix="eject-") as temporary,
            stub_fleet(Path(temporary), options.replicas) as ref,
        ):
            result = asyncio.run(measure(ref, options.rounds, **how))
    result["servers"] = f"fleet {options.fleet}" if options.fleet else "stubs"
    options.result.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return int(result["ejected_s_worst"] > 10 or (result["failed_after_ejection_percent"] or 0) > 1)


if __name__ == "__main__":
    sys.exit(main())
