"""Stub servers with their supervisor, and trainers: of the SDK, and of the fleet URL."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

import httpx

from skyctl.kill_points import VARIABLE
from tests.faults.stub_fleet import ROOT, StubFleet
from tests.forking import command
from tests.stub.url_trainer import body
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint

BOUND_S = 60.0


async def train(
    directory: Path, home: Path, version: str, seed: int, *options: str, kill_at: str = ""
) -> tuple[int, str]:
    """A trainer's process to its end: exit code, and what it said."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")}
    run = ("-m", "tests.stub.trainer", str(directory / "fleet.yaml"), version, str(seed))
    modules = f"{ROOT}:{environ.get('PYTHONPATH', '')}"
    process = command(
        [sys.executable, *run, *options],
        cwd=directory,
        env={**environ, "SKYCTL_HOME": str(home), "PYTHONPATH": modules, VARIABLE: kill_at},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    _, said = await asyncio.to_thread(process.communicate, timeout=BOUND_S)
    assert process.returncode is not None
    return process.returncode, said


class Supervised(StubFleet):
    """Two stubs with a supervisor."""

    token = ""

    @property
    def headers(self) -> dict[str, str]:
        """Of requests to a stub's own routes, which also pass while a push has frozen it."""
        token = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return {**token, "skyctl-freeze": "take-over"}

    def train(self, version: str, seed: int, *options: str) -> tuple[int, str]:
        home = self.directory / "home"
        return asyncio.run(train(self.directory, home, version, seed, *options))

    def states(self) -> list[dict[str, Any]]:
        urls = [row["url"] for row in self.replicas().values()]
        return [self.state(url) for url in urls]

    def state(self, url: str) -> dict[str, Any]:
        """What the stub at this URL says of itself."""
        answer = httpx.get(f"{url}/stub/state", headers=self.headers, trust_env=False)
        state: dict[str, Any] = answer.json()
        return state

    def until(self, state: str, *names: str) -> dict[str, dict[str, Any]]:
        """The replicas, once these are in this state, or all."""
        deadline = time.monotonic() + self.bound_s
        while True:
            rows = self.replicas()
            if {rows[name]["state"] for name in names or rows} == {state}:
                return rows
            assert time.monotonic() < deadline, rows
            time.sleep(0.1)

    def until_event(self, words: str) -> None:
        """Once an event says so."""
        deadline = time.monotonic() + self.bound_s
        while words not in str(events := self.json("events")["data"]["events"]):
            assert time.monotonic() < deadline, events
            time.sleep(0.1)

    def until_restarted(self, name: str, pid: int) -> None:
        """Once it serves in another process than this."""
        deadline = time.monotonic() + self.bound_s
        while (row := self.replicas()[name])["pid"] == pid or row["state"] != "ready":
            assert time.monotonic() < deadline, row
            time.sleep(0.1)


class Fleet(Supervised):
    """Two stubs, their supervisor and the fleet URL."""

    port: int

    @property
    def url(self) -> str:
        secret = f"trainer:{self.token}@" if self.token else ""
        return f"http://{secret}127.0.0.1:{self.port}"

    def call(self, call: str, *, seed: int = 1, version: str = "step-1", **how: Any) -> Any:
        """One of a trainer's calls; returns its answer's JSON."""
        answer = self.post(call, body(call, version, seed), **how)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, content: Any = None, **how: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/{path}", json=content, timeout=60, trust_env=False, **how)

    def get(self, path: str, **how: Any) -> httpx.Response:
        return httpx.get(f"{self.url}/{path}", timeout=60, trust_env=False, **how)

    def train_begun(self, *options: str, seed: int = 1, version: str = "step-1") -> Popen[str]:
        """A trainer's process."""
        run = ("-m", "tests.stub.url_trainer", self.url, version, str(seed))
        return command(
            [sys.executable, *run, *options],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            text=True,
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
        )

    def trainer(self, *options: str, seed: int = 1, version: str = "step-1") -> tuple[int, str]:
        """A trainer's process to its end: exit code and stderr."""
        process = self.train_begun(*options, seed=seed, version=version)
        _, errors = process.communicate(timeout=self.bound_s)
        return process.returncode or 0, errors

    @contextmanager
    def delayed(self, call: str, seconds: float, *names: str) -> Iterator[None]:
        """Servers answer a trainer's call late: these, or all."""
        rows = self.replicas()
        fault = {f"/{call}": {"kind": "delay", "seconds": seconds}}
        how: dict[str, Any] = {"headers": self.headers, "trust_env": False}
        for name in names or rows:
            httpx.post(f"{rows[name]['url']}/stub/faults", json=fault, **how)
        try:
            yield
        finally:
            for name in names or rows:  # a server that died is without it anyway
                with suppress(httpx.TransportError):
                    httpx.post(f"{rows[name]['url']}/stub/faults", json={}, **how)

    def calls(self, url: str, call: str) -> int:
        """How many such calls a server has got."""
        return int(self.state(url)["calls"].get(f"/{call}", 0))

    def until_called(self, url: str, call: str, before: int) -> None:
        """Return once a server carries another such call out than those `before`."""
        deadline = time.monotonic() + self.bound_s
        while self.calls(url, call) == before:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def whole(self) -> list[dict[str, Any]]:
        """The servers' states, once all serve: never parts of two checkpoints."""
        self.until("ready")
        states = self.states()
        assert len({state["digest"] for state in states}) == 1
        for state in states:
            assert not (state["paused"] or state["update_open"] or state["half_loaded"])
            assert "half loaded" not in state["served"] and "unpaused" not in str(state["served"])
        return states


@contextmanager
def trainer_fleet(
    directory: Path, port: int, auth: str = "none", kind: type[Fleet] = Fleet, more: str = ""
) -> Iterator[Fleet]:
    """Such a fleet, up until the end of the block; `more` is of its file."""
    fleet = kind(directory)
    fleet.port = port
    fleet.write(
        extra=f"auth: {auth}\ntrainer: {{port: {fleet.port}}}\n"
        "weight_transfer: {backend: sparse_nccl, update_timeout_s: 20}\ncontrol_timeout_s: 5\n"
        f"{more}"
    )
    write_checkpoint(directory / "model", tiny_tensors(1))
    fleet.run("up")
    if auth != "none":
        access = fleet.json("urls")["data"]["access"]
        fleet.token = Path(access["control_token_file"]).read_text().strip()
    try:
        yield fleet
    finally:
        fleet.run("down", "--drain-timeout", "0")
