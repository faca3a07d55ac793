"""The same cycles on real vLLM CPU servers and the real router, by commands as users type them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from skyctl.store.state import FleetState
from tests.faults.killing.commands import Commands
from tests.faults.killing.supervised import SupervisedFleet
from tests.stub.state import MEMORY

TIMEOUT_S = 300.0
_PROMPT = "the cat"


class RealFleet(SupervisedFleet):
    """`skyctl init --tiny`, and up. What a server holds is told by its greedy tokens."""

    name = "tiny"
    scale = 128  # the tiny checkpoint has 0.9 MB
    bound_s = 90.0

    def _set_up(self) -> tuple[Commands, dict[str, Path]]:
        commands = Commands(self.directory, subprocess.Popen, TIMEOUT_S)
        code, _, errors = commands.run("init", "--tiny", ".", "--name", self.name)
        assert code == 0, errors
        self._write_trial(min_logprob=-1000.0)
        return commands, {name: self.directory / "checkpoints" / name for name in ("a", "b")}

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
