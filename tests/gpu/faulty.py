"""A GPU fleet whose parts are killed and stopped while a checkpoint is pushed."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.memory import end_idle_sender, senders
from skyctl.kill_points import VARIABLE
from tests.gpu.devices import available, free_mib
from tests.integration.fleet_cli import FleetCli, greedy

PUSH_TIMEOUT_S = 200.0
HEALTHY_TIMEOUT_S = 240
MEMORY_SLACK_MIB = 1024
_PROMPT = [40, 41, 42, 43]


class FaultyFleet(FleetCli):
    """Runs checkpoint "a" at first; every push is labelled with its checkpoint's name."""

    def __init__(
        self,
        root: Path,
        transport: str,
        checkpoints: dict[str, Path],
        *,
        device: str = "cuda",
        chunk_size: str = "8MiB",
        replicas: int = 1,
        warm: bool = True,
        backend: str | None = None,
    ) -> None:
        self.transport = transport
        self.ticket = root / "ticket"
        environment = {VARIABLE: f"@{self.ticket}"}
        super().__init__(root / "fleet", root / "home", extra_env=environment)
        self.checkpoints = checkpoints
        self.answers: dict[str, list[int]] = {}
        self.directory.mkdir()
        settings: dict[str, Any] = {
            "name": "faulty",
            "model": str(checkpoints["a"]),
            "served_model_name": "faulty",
            "replicas": replicas,
            "device": device,
            "args": {"max-model-len": 1024, "enforce-eager": True},
            "weight_transfer": {
                "transport": transport,
                "chunk_size": chunk_size,
                "warm": warm,
                "rendezvous_timeout_s": 15,
                "update_timeout_s": 20,
            },
            "router": {"enabled": False},
        }
        if backend is not None:
            settings["weight_transfer"]["backend"] = backend
        if device == "cuda":
            settings["gpus"] = available()[:replicas]
            settings["args"]["gpu-memory-utilization"] = 0.2
        # JSON is YAML
        (self.directory / "fleet.yaml").write_text(json.dumps(settings))

    def up(self) -> None:
        """Start it, and learn what each checkpoint answers."""
        self.run("up", timeout_s=420)
        self.answers["a"] = self.answer()
        for name in ("b", "a"):
            self.push(name)
            self.answers[name] = self.answer()
        assert self.answers["a"] != self.answers["b"]

    def push(
        self, name: str, expect: int | None = 0, *, layout: str = "auto"
    ) -> subprocess.CompletedProcess[str]:
        return self.run(*self._push(name, layout), timeout_s=PUSH_TIMEOUT_S, expect=expect)

    def push_until_update(self, name: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
        """A push that has just begun to update servers, and its senders, which are stopped.

        A broadcast cannot end without them, however fast it is; what is copied out of their memory
        can.
        """
        pushing = self.start(*self._push(name, "checkpoint"))
        assert pushing.stderr is not None
        stopped: list[psutil.Process] = []
        for line in pushing.stderr:
            if line.strip() == "pause":
                stopped = senders(str(self.home))  # takes longer than an update does
            if line.strip() == "start":
                for sender in stopped:
                    sender.suspend()
            if line.strip() == "update":
                return pushing, stopped
        raise AssertionError(f"the push never came to its update: exit {pushing.wait(30)}")

    def _push(self, name: str, layout: str) -> tuple[str, ...]:
        checkpoint = str(self.checkpoints[name])
        return ("sync-weights", checkpoint, "--weight-version", name, "--layout", layout)

    def server(self) -> dict[str, Any]:
        """The first replica, as `skyctl status` has it."""
        replicas: list[dict[str, Any]] = self.data("status")["replicas"]
        return replicas[0]

    def server_processes(self) -> list[psutil.Process]:
        """The first server's process and everything below it."""
        leader = psutil.Process(self.server()["pid"])
        return [leader, *leader.children(recursive=True)]

    def wait_for_another_than(self, pid: int) -> None:
        """Until the first server is another process than this one, and ready."""
        deadline = time.monotonic() + HEALTHY_TIMEOUT_S
        while (server := self.server())["pid"] in (pid, None) or server["state"] != "ready":
            assert time.monotonic() < deadline, server
            time.sleep(0.5)

    def end_idle_sender(self) -> None:
        """So that the next push starts a sender that reads the ticket."""
        end_idle_sender(str(self.home))

    def answer(self) -> list[int]:
        """Greedy token ids of a fixed prompt, the same from every server."""
        urls, key = self.data("urls")["servers"].values(), self.key
        answers = [greedy(url, "faulty", _PROMPT, 8, key=key) for url in urls]
        assert all(answer == answers[0] for answer in answers), answers
        return answers[0]

    def assert_healthy(self, free_before_mib: list[int]) -> str:
        """Recover what a push left in quarantine, and wait until it is ready; returns its version.

        It must answer as the version that it names, and leave the GPUs as they were: without an
        idle sender, whose context stays until it ends.
        """
        self.run("recover", "--yes", timeout_s=HEALTHY_TIMEOUT_S)
        self.run(
            *("wait", "--for", "ready", "--timeout", str(HEALTHY_TIMEOUT_S)),
            timeout_s=HEALTHY_TIMEOUT_S + 30,
        )
        status = self.data("status")
        assert status["health"] == "healthy", status
        version: str = self.server()["weight_version"]
        assert self.answer() == self.answers[version]
        assert {one["weight_version"] for one in status["replicas"]} == {version}
        self.end_idle_sender()
        deadline = time.monotonic() + 15
        while not _as_before(free_before_mib):
            assert time.monotonic() < deadline, (free_before_mib, free_mib())
            time.sleep(0.5)
        return version


def _as_before(free_before_mib: list[int]) -> bool:
    pairs = zip(free_mib(), free_before_mib, strict=True)
    return all(now >= before - MEMORY_SLACK_MIB for now, before in pairs)
