"""What an SGLang server says of its state, by skyctl's keeper or else by its own routes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from skyctl.engines.http_server import HttpServer, ignoring_status
from skyctl.engines.sglang.inside import keeper
from skyctl.engines.sglang.inside.adapters import LOAD, UNLOAD
from skyctl.errors import ServerError
from skyctl.http.target import ServerTarget

_MANAGED = keeper.CALLS | {
    *("/update_weight_version", "/weights_checker", "/flush_cache", LOAD, UNLOAD)
}
"""Routes that require the admin key if there are two keys (`utils/auth.py`)."""
POLL_S = 0.1
_ASKED_AGAIN = 2
_PROBE = {
    "input_ids": [0],
    "lora_path": "skyctl-asks-whether-you-are-paused",
    "sampling_params": {"max_new_tokens": 1},
}
"""A running server refuses it (there is no such adapter); a paused one reads it when resumed."""


@dataclass(frozen=True)
class State:
    """The keeper's report (`inside/keeper.py`)."""

    paused: bool
    """Whether the scheduler runs no requests."""
    locked: bool
    """Whether the lock of updates is taken."""
    released: frozenset[str]
    """What memory was given back, by tag."""
    memory_saver: bool
    """Whether it was started so that it can give memory back."""
    cpu_backup: bool
    """Whether sleeping keeps a copy of the weights."""
    groups: frozenset[str]
    """The groups of senders that its workers are in."""
    nccl: Mapping[str, str]
    """Its environment variables of NCCL."""
    lora: tuple[str, ...] | None
    """The modules that it takes LoRA adapters for; None if it takes none."""


class SGLangState(HttpServer):
    """The questions about one server. `probe_s`: a server without a keeper counts as paused if it
    does not answer a probe for so long while it answers other questions.
    """

    probe_s = 1.0

    async def is_paused(self) -> bool:
        """Round-trips the scheduler, which answers even while it is paused."""
        state = await self._state()
        if state is not None:
            return state.paused
        return await self._holds_a_probe()

    async def _holds_a_probe(self) -> bool:
        """Whether it answers later questions but not the probe; a busy one is late with all."""
        probe = asyncio.create_task(self._call("POST", "/generate", json=_PROBE))
        try:
            for _ in range(2):
                await asyncio.wait([probe], timeout=self.probe_s / 2)
                if probe.done():
                    break
                await self._info()
            if not probe.done():
                return True
            with ignoring_status(400):
                await probe
        finally:
            probe.cancel()
            await asyncio.wait([probe])
        return False

    async def _state(self, target: ServerTarget | None = None) -> State | None:
        """The keeper's report; None without a keeper."""
        target, key = target or self.target, self.target.inference_key
        try:
            answer = await self._client.call(target, "GET", keeper.STATE, timeout_s=self._timeout_s)
        except ServerError as error:
            if error.status == 401 and key not in (None, target.api_key):
                # SGLang's own key check takes an unknown path for one of the users' routes
                return await self._state(replace(target, api_key=key))
            if error.status != 404:
                raise
            return None
        state = self._mapping(answer, keeper.STATE)
        return self._understood(
            keeper.STATE,
            lambda: State(
                bool(state["paused"]),
                bool(state["locked"]),
                frozenset(map(str, state["released"])),
                bool(state["memory_saver"]),
                bool(state["cpu_backup"]),
                frozenset(map(str, state.get("groups", ()))),
                dict(state.get("nccl", {})),
                None if state.get("lora") is None else tuple(map(str, state["lora"])),
            ),
        )

    async def _session(self, path: str, timeout_s: float | None) -> None:
        """Begin or end a session of updates: 404 by an SGLang that has none, with two keys too."""
        try:
            await self._call("POST", path, json={}, timeout_s=timeout_s)
        except ServerError as error:
            key = self.target.inference_key
            if error.status != 401 or key in (None, self.target.api_key):
                raise
            # as in `_state`: the users' key may pass, where there is no such route
            target, timeout_s = replace(self.target, api_key=key), timeout_s or self._timeout_s
            await self._client.call(target, "POST", path, json={}, timeout_s=timeout_s)

    async def _kept(self, verb: str) -> State:
        state = await self._state()
        if state is None:
            raise ServerError(
                f"{self.target.name} cannot {verb} by skyctl: SGLang does not say what memory it "
                "has released, and ends when it is asked for the same twice",
                hint="let skyctl start it; or start it with `python -m "
                "skyctl.engines.sglang.inside.serve` in place of `sglang serve`",
            )
        return state

    async def _idle(self, state: State | None) -> bool:
        """Whether no request runs or is held; without a keeper, some steps ago."""
        if state is not None:
            return not state.locked
        loads = (await self._object("GET", "/v1/loads")).get("loads")
        return self._understood(
            "/v1/loads",
            lambda: (
                not any(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads or ())
            ),
        )

    async def _info(self) -> dict[str, Any]:
        """Its arguments and version; the scheduler answers as well. Without a keeper, SGLang fails
        some concurrent questions (`inside/keeper.py`), which are repeated.
        """
        for _ in range(_ASKED_AGAIN):
            with ignoring_status(500):
                return await self._object("GET", "/server_info")
            await asyncio.sleep(POLL_S)
        return await self._object("GET", "/server_info")

    def _target_at(self, path: str) -> ServerTarget:
        if path in _MANAGED or self.target.inference_key is None:
            return self.target
        return replace(self.target, api_key=self.target.inference_key)
