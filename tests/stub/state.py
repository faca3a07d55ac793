"""The stub's engine: vLLM's pause, sleep and weight-update states as one small machine.

    scheduler   running ⇄ paused-new (abort, wait: new requests queue) / paused-all (keep: frozen)
    memory      resident → asleep {weights, kv_cache} → resident; level 2 loses the weights
    update      closed → open → closed; a failed chunk closes it and leaves the weights half loaded,
                which skyctl's engine says once, at the next start

What the real server does was read in vLLM 0.32 (`v1/engine/core.py`, `v1/worker/gpu_worker.py`)
and is checked against it by tests/integration/test_contract_stub.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.stub import fit, rows
from tests.stub.gpus import SharedMemory

MEMORY = frozenset({"weights", "kv_cache"})
CACHES = frozenset({"prefix", "external", "encoder"})


class EngineRefused(Exception):
    """vLLM would raise here; the app answers 500 with this text."""


class Scheduler(StrEnum):
    """What the scheduler does with requests."""

    RUNNING = "running"
    PAUSED_NEW = "paused-new"
    PAUSED_ALL = "paused-all"


def digest_of_checkpoint(model: str) -> str:
    """Digest of the weights in a directory, the same that pushing them gives; of the files, or of
    the name, where it is no checkpoint."""
    if checksums := rows.checksums_of_checkpoint(model):
        names, numbers = list(checksums), list(checksums.values())
        return digest_of_updates([{"names": names, "crc32": numbers}])
    files = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    if not files:
        return hashlib.sha256(model.encode()).hexdigest()
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def digest_of_updates(updates: list[dict[str, Any]]) -> str:
    """Digest of the tensors that were pushed, whatever chunks and slots they came in.

    Replace it (`StubEngine.weigh`) to read the real bytes.
    """
    if all("crc32" in update for update in updates):
        received: dict[str, int] = {}
        for update in updates:
            received.update(zip(update["names"], update["crc32"], strict=True))
        return hashlib.sha256(json.dumps(received, sort_keys=True).encode()).hexdigest()
    return hashlib.sha256(json.dumps(updates, sort_keys=True).encode()).hexdigest()


@dataclass
class StubEngine:
    """State of one stub server. `digest` stands for the loaded weights: tokens derive from it.

    `log` lists what was carried out, in order. `weigh` turns received update_infos into the new
    digest. Without `transfer_backend` the push routes fail, as vLLM's do; without `extension` its
    workers have none of skyctl's methods.
    """

    model: str = "stub-model"
    version: str = "0.32.0"
    world_size: int = 1
    arrangement: str = ""
    transfer_backend: str = "skyctl"
    extension: bool = True
    weigh: Callable[[list[dict[str, Any]]], str] = digest_of_updates
    digest: str = ""
    nccl_problem: str = ""
    not_finite: str = ""
    update_problem: str = ""
    settings: dict[str, Any] = field(default_factory=dict)  # more sections of its configuration
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()  # tensors that its loader leaves out
    ties_output: bool = False
    nccl_settings: dict[str, str] = field(default_factory=dict)
    weight_version: str = "default"
    scheduler: Scheduler = Scheduler.RUNNING
    refuses_arrivals: bool = False  # while it is paused, 0.33
    asleep: set[str] = field(default_factory=set)
    sleep_level: int = 0
    update_open: bool = False
    half_loaded: bool = False
    broke_off: bool = False
    dead: bool = False
    requests: int = 0
    queued: int = 0
    cached: set[str] = field(default_factory=lambda: set(CACHES))  # of CACHES, in use at first
    connector_fails: bool = False  # to drop what it keeps elsewhere
    kv_reader: StubEngine | None = None  # a decode server that has KV of this one to fetch
    kv_lease_s: float = 30.0
    logprob: float = -0.5  # of every token it generates
    prompt_tokens: int = 0
    generation_tokens: int = 0
    init_infos: list[dict[str, Any]] = field(default_factory=list)
    update_infos: list[dict[str, Any]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    served: list[str] = field(default_factory=list)  # what it held at each resume
    memory: SharedMemory | None = None  # of GPUs that other models' servers use as well
    contents: rows.Contents = field(default_factory=dict)
    draft_contents: rows.Contents = field(default_factory=dict)  # of the model it drafts with
    draft_takes: str = ""  # begins the names of the tensors that one is made of

    def __post_init__(self) -> None:
        loads = os.environ.get("STUB_LOADS", self.model)  # a directory of the same name elsewhere
        self.digest = self.digest or digest_of_checkpoint(loads)
        self.contents = rows.of_checkpoint(loads)
        self.config = fit.config_of(loads)
        self.changed = asyncio.Condition()
        self.abort_count = 0
        self._chunks: list[dict[str, Any]] = []
        self._held: list[dict[str, Any]] = []  # what was pushed since everything was

    def unwrapped(self, names: Sequence[str]) -> list[str]:
        """Tensors of an adapter that would reach no layer, as its configuration has it."""
        targets = self.settings.get("lora_config", {}).get("target_modules")
        return [name for name in names if targets and not any(f".{t}." in name for t in targets)]

    @property
    def draft_digest(self) -> str:
        """Of what it drafts with."""
        return hashlib.sha256(repr(sorted(self.draft_contents.items())).encode()).hexdigest()

    def load_draft(self, path: str) -> None:
        """What its draft model takes of a checkpoint."""
        self.log.append(f"draft {path}" if self.paused else "draft while it serves")
        held = rows.of_checkpoint(path)
        taken = {name: value for name, value in held.items() if name.startswith(self.draft_takes)}
        self.draft_contents = taken

    @property
    def since(self) -> tuple[int, ...]:
        """The release that it answers as."""
        return tuple(int(part) for part in self.version.split(".")[:2])

    @property
    def paused(self) -> bool:
        return self.scheduler is not Scheduler.RUNNING

    @property
    def sleeping(self) -> bool:
        """vLLM's meaning: also true for a mere pause."""
        return self.paused or bool(self.asleep)

    async def pause(self, mode: str) -> None:
        self._alive()
        if mode == "abort":
            self.abort_count += 1
        await self._become(Scheduler.PAUSED_ALL if mode == "keep" else Scheduler.PAUSED_NEW)
        if mode in ("wait", "abort"):
            async with self.changed:
                await self.changed.wait_for(lambda: self.requests == 0 or not self.paused)
        if (reader := self.kv_reader) is not None:  # it counts as work, in every mode
            await asyncio.sleep(0.02)
            async with reader.changed:
                await reader.changed.wait_for(lambda: not reader.paused)
        await self._note(f"pause {mode}")

    async def pause_generation(self, mode: str) -> None:
        """0.33: arrivals are refused, where 0.32 queues them; a sleep queues them in both."""
        self.refuses_arrivals = mode != "keep"
        await self.pause(mode)

    async def resume(self) -> None:
        self._alive()
        self.refuses_arrivals = False
        half = self.half_loaded or (self.update_open and bool(self._chunks))
        self.served.append("half loaded" if half else self.digest)
        await self._become(Scheduler.RUNNING)
        await self._note("resume")

    async def sleep(self, level: int, mode: str) -> None:
        await self.pause(mode)
        if level >= 1 and not self.asleep:  # vLLM's executor ignores it while a part is asleep
            self.asleep = set(MEMORY)
            self.sleep_level = level
            if self.memory is not None:
                self.memory.release()
            if level == 2:
                self.digest, self.contents = "discarded", {}
        self.log.append(f"sleep {level}")

    async def wake(self, tags: list[str]) -> bool:
        self._alive()
        if self.memory is not None:
            self.memory.take()
        self.asleep -= set(tags) or MEMORY
        self.log.append(f"wake {','.join(tags) or 'all'}")
        if self.asleep:
            return False
        self.sleep_level, self.refuses_arrivals = 0, False
        await self._become(Scheduler.RUNNING)
        return True

    def init_transfer(self, init_info: dict[str, Any]) -> None:
        self._can_transfer()
        self.init_infos.append(init_info)
        self.log.append("init")

    def start_update(self) -> None:
        self._can_transfer()
        if self.update_open:
            raise EngineRefused(
                "start_weight_update called while a weight update is already active"
            )
        if self.broke_off and self.transfer_backend == "skyctl":
            self.broke_off = False
            raise EngineRefused("an earlier weight update broke off half-way; start again")
        self.update_open, self._chunks = True, []
        self.log.append("start")

    def update(self, update_info: dict[str, Any]) -> None:
        self._can_transfer()
        if not self.update_open:
            raise EngineRefused("start_weight_update must be called before update_weights.")
        if "weights" in self.asleep:
            self.dead = True  # what it can do to a real engine core
            raise EngineRefused("EngineCore encountered an issue.")
        if "names" not in update_info:
            # nothing of it was loaded: the session is closed, the weights are the old ones
            self.update_open, self.broke_off = False, True
            raise EngineRefused("Worker failed with error 'unexpected keyword argument'")
        try:
            self.weigh([update_info])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.fail_update()
            raise EngineRefused(f"Worker failed with error {error!r}") from error
        if not self._chunks:
            self.contents = {}
        self.contents |= rows.of_update(self.init_infos[-1], update_info)
        self._chunks.append(update_info)
        self.update_infos.append(update_info)
        self.log.append("update")

    def fail_updates(self, calls: Collection[int]) -> None:
        """Let a worker raise on these calls of `update` from now on, from 1."""
        carry_out, made = type(self).update, 0

        def update(update_info: dict[str, Any]) -> None:
            nonlocal made
            made += 1
            if made in calls:
                self.fail_update()
                raise EngineRefused("Worker failed with error 'no room'")
            carry_out(self, update_info)

        self.update = update  # type: ignore[method-assign]

    def fail_update(self) -> None:
        """What is left when a worker raises on a chunk."""
        self.update_open, self.half_loaded, self.broke_off = False, True, True
        self.log.append("update failed")

    def finish_update(self, weight_version: str | None) -> None:
        self._can_transfer()
        if not self.update_open:
            raise EngineRefused(
                "finish_weight_update called without a matching start_weight_update."
            )
        if self.half_loaded:
            # a finish scrubs the half-loaded model; chunks loaded before that are garbage
            self.digest = "garbage" if self._chunks else "scrubbed"
        elif self._chunks:
            partial = bool(self.init_infos and self.init_infos[-1].get("partial"))
            self._held = [*(self._held if partial else ()), *self._chunks]
            self.digest = self.weigh(self._held)
        if self._chunks and not self.paused:
            self.served.append(f"{self.digest}, unpaused")
        self.update_open = self.half_loaded = False
        if weight_version is not None:
            self.weight_version = weight_version
        self.log.append("finish")

    def reload(self, path: str) -> None:
        self._alive()
        if not Path(path).is_dir():
            raise EngineRefused(f"Worker failed with error 'no model at {path}'")
        self.digest = digest_of_checkpoint(path)
        self.contents = rows.of_checkpoint(path)
        self.log.append("reload")

    def load(self, contents: rows.Contents) -> None:
        """Take all tensors at once."""
        self._alive()
        crc32 = [zlib.crc32(data) for _, data in contents.values()]
        self.digest = digest_of_updates([{"names": list(contents), "crc32": crc32}])
        self.contents = contents
        if not self.paused:
            self.served.append(f"{self.digest}, unpaused")
        self.log.append("load")

    def reset_kv(self, *, external: bool, requeue: bool) -> bool:
        if self.requests and not requeue:
            return False
        self.cached.discard("prefix")
        if external and not self.connector_fails:
            self.cached.discard("external")
        return not (external and self.connector_fails)

    async def until_logged(self, entry: str) -> None:
        """Wait until `entry` was carried out: what tests wait for instead of sleeping."""
        async with self.changed:
            await self.changed.wait_for(lambda: entry in self.log)

    async def _note(self, entry: str) -> None:
        async with self.changed:
            self.log.append(entry)
            self.changed.notify_all()

    def _can_transfer(self) -> None:
        self._alive()
        if not self.transfer_backend:
            raise EngineRefused("Worker failed with error 'Weight transfer not configured.'")

    def _alive(self) -> None:
        if self.dead:
            raise EngineRefused("EngineCore encountered an issue.")

    async def _become(self, scheduler: Scheduler) -> None:
        async with self.changed:
            self.scheduler = scheduler
            self.changed.notify_all()
