"""The same cycles on real vLLM CPU servers and the real router, by commands as users type them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from skyctl.store.state import FleetState
from tests.faults.killing.supervised import Runner, SupervisedFleet
from tests.stub.state import MEMORY

UP_TIMEOUT_S = 300.0
_PROMPT = "the cat"


class Commands:
    """`skyctl` in a process of its own, with nothing warm and every guardian in place."""

    def run(
        self, *argv: str, cwd: Path, env: dict[str, str], guardian: bool, timeout_s: float = 150.0
    ) -> tuple[int, dict[str, Any], str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("SKYCTL_")}
        done = subprocess.run(
            [sys.executable, "-m", "skyctl", *argv],
            cwd=cwd,
            env={**inherited, **env},
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(timeout_s, UP_TIMEOUT_S if argv[0] == "up" else 0.0),
            check=False,
        )
        try:
            envelope: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            envelope = {}
        return done.returncode, envelope, done.stderr

    def close(self) -> None: ...


class RealFleet(SupervisedFleet):
    """`skyctl init --tiny`, and up. What a server holds is told by its greedy tokens."""

    name = "tiny"
    scale = 128  # the tiny checkpoint has 0.9 MB
    bound_s = 90.0

    def _set_up(self) -> tuple[Runner, dict[str, Path]]:
        runner = Commands()
        env = {"SKYCTL_HOME": str(self.home)}
        code, _, errors = runner.run(
            *("init", "--tiny", ".", "--name", self.name),
            cwd=self.directory,
            env=env,
            guardian=True,
            timeout_s=120.0,
        )
        assert code == 0, errors
        self._write_canary(min_logprob=-1000.0)
        return runner, {name: self.directory / "checkpoints" / name for name in ("a", "b")}

    def _asleep(self) -> list[int]:
        """By the record: a CPU server that sleeps looks like one that is paused."""
        with FleetState(self.paths.database) as state:
            return [len(MEMORY) if row.sleep_level else 0 for row in state.servers()]

    def _states(self) -> list[dict[str, Any]]:
        token = (self.paths.control_token).read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        with httpx.Client(trust_env=False, timeout=30.0, headers=headers) as client:
            return [self._state(client, url) for url in self.urls]

    def _state(self, client: httpx.Client, url: str) -> dict[str, Any]:
        paused = client.get(f"{url}/is_paused").json()["is_paused"]
        body = {
            "model": client.get(f"{url}/v1/models").json()["data"][0]["id"],
            "prompt": _PROMPT,
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        tokens: list[int] = []
        if not paused:
            answer = client.post(f"{url}/v1/completions", json=body)
            tokens = answer.raise_for_status().json()["choices"][0]["token_ids"]
        return {
            "served": [],
            "paused": paused,
            "update_open": False,
            "half_loaded": False,
            "digest": json.dumps(tokens),
            "weight_version": client.get(f"{url}/weight_info").json()["weight_version"],
        }


@contextmanager
def real_fleet(directory: Path) -> Iterator[RealFleet]:
    """A prepared fleet of two servers; everything of it is down at the end of the block."""
    fleet = RealFleet(directory)
    try:
        began = time.monotonic()
        fleet.prepare()
        sys.stderr.write(f"real fleet: ready after {time.monotonic() - began:.0f} s\n")
        yield fleet
    finally:
        fleet.close()
