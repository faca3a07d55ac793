"""One SGLang server's control routes, as typed calls. Read in SGLang 0.5.14 to 0.5.23
(`entrypoints/http_server.py`).

None of these calls can end a server: behind skyctl's keeper (`inside/keeper.py`) the server refuses
those that would, and to a server without a keeper they are not sent.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from skyctl.engines.base import (
    Arguments,
    Refusal,
    ServerMetrics,
    StartedWith,
)
from skyctl.engines.dialect import GROUP_PREFIX
from skyctl.engines.http_server import ignoring_status
from skyctl.engines.launches import update_problem
from skyctl.engines.prometheus import samples, server_metrics
from skyctl.engines.sglang.adapters import SGLangAdapters, config_problem
from skyctl.engines.sglang.inside import keeper
from skyctl.engines.sglang.state import POLL_S
from skyctl.errors import DeadlineExceeded, ServerError
from skyctl.states import PauseMode

_COUNTS = {
    "running": "sglang:num_running_reqs",
    "waiting": "sglang:num_queue_reqs",
    "prompt_tokens": "sglang:prompt_tokens_total",
    "generation_tokens": "sglang:generation_tokens_total",
    "prefix_cache_queries": "sglang:prompt_tokens_total",  # it counts tokens
    "prefix_cache_hits": "sglang:cached_tokens_total",
}
_NO_SESSION = "no weight-update session is open"
_SLEEP_TAGS = ("kv_cache", "weights")


class SGLangServer(SGLangAdapters):
    """`Server` (`engines/base.py`) of SGLang. A server that skyctl did not start, and that has no
    keeper, can neither sleep nor wake.
    """

    _updates = False

    async def health(self) -> None:
        """Return if it has warmed up. A server that skyctl did not start generates a token for the
        check, unless SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=false, and fails it while paused.
        """
        await self._text("GET", "/health")

    async def version(self) -> str:
        return str((await self._info()).get("version", ""))

    async def generates_from_tokens(self) -> bool:
        """It does (`/generate`), but not by the protocol that skyctl's clients speak."""
        return False

    async def ranks(self) -> tuple[int, int]:
        if self.known_ranks is None:
            info = await self._info()
            within = int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1)
            self.known_ranks = within * int(info.get("dp_size") or 1), within
        return self.known_ranks

    async def started_with(self) -> StartedWith:
        info = await self._info()
        return StartedWith(
            str(info.get("model_path") or ""),
            str(info.get("load_format") or ""),
            update_problem=settings_problem(info),
            config_problem=partial(config_problem, info),
        )

    async def metrics(self) -> ServerMetrics:
        """The sleep level is the keeper's. Raises ServerError without --enable-metrics.

        SGLang's counts of requests are from its last prefill, or some tens of steps old. Here they
        are none only if none runs; without a keeper, if none ran some steps ago.
        """
        try:
            page, state = await asyncio.gather(self._text("GET", "/metrics"), self._state())
        except ServerError as error:
            if error.status != 404:
                raise
            raise ServerError(
                f"{self.target.name} tells nothing of its load: it runs without --enable-metrics",
                status=404,
                hint="start it with --enable-metrics",
            ) from error
        level = None
        if state is not None:
            level = (1 if state.cpu_backup else 2) if state.released else 0
        metrics = server_metrics(samples(page, "sglang:"), _COUNTS, "sglang:token_usage", level)
        if state is not None and not state.locked:
            return replace(metrics, running=0, waiting=0)
        if metrics.in_flight or await self._idle(state):
            return metrics
        return replace(metrics, running=1)

    # control

    async def pause(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """abort ends running requests, keep holds them in place. SGLang has no mode for wait: it
        pauses once nothing runs, and holds no requests back until then.

        The cache is not cleared, whatever `clear_cache` says: `reset_caches` does that.
        """
        if mode == "wait":
            await self._drain(self._timeout_s if timeout_s is None else timeout_s)
        elif mode == "keep":
            await self._pause("in_place", timeout_s)
        else:
            paused = await self.is_paused()
            async with self._resumed_on_failure(paused):
                if paused:
                    # an abort does not end requests held in place: it would never be answered
                    await self._pause("retract", timeout_s)
                await self._pause("abort", timeout_s)

    @asynccontextmanager
    async def _resumed_on_failure(self, paused: bool) -> AsyncIterator[None]:
        """Resume a server that was not `paused` before if its pause fails. SGLang is paused from
        the start of an abort, and stays paused if the abort does not finish.
        """
        try:
            yield
        except ServerError:
            if not paused:
                with suppress(ServerError):  # the caller receives the first error
                    await self.resume()
            raise

    async def resume(self) -> None:
        await self._call("POST", keeper.CONTINUE, json={})

    async def is_sleeping(self) -> bool:
        state = await self._state()
        return state is not None and bool(state.released)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Release weights and KV cache. Level 1 needs --enable-weights-cpu-backup."""
        state = await self._kept("sleep")
        if state.released:
            return
        if not state.memory_saver:
            raise ServerError(
                f"{self.target.name} would free nothing: it runs without --enable-memory-saver",
                hint="leave `enable-memory-saver` out of `args`, and restart it",
            )
        if level == 1 and not state.cpu_backup:
            raise ServerError(
                f"{self.target.name} keeps no copy of its weights: it runs without "
                "--enable-weights-cpu-backup",
                hint="skyctl sleep --level 2, and push before it serves again",
            )
        async with self._resumed_on_failure(state.paused):
            await self.pause(mode)
            await self._call("POST", keeper.RELEASE, json={"tags": list(_SLEEP_TAGS)})

    async def wake(self, tags: Sequence[str] = ()) -> bool:
        """Resume only what is released. Once nothing is released any more, resume requests, too."""
        state = await self._kept("wake")
        woken = state.released & (frozenset(tags) or state.released)
        # weights first: the cache comes after them in memory
        for tag in sorted(woken, reverse=True):
            await self._call("POST", keeper.RESUME, json={"tags": [tag]})
        if state.released - woken:
            return False
        await self.resume()
        return True

    async def prepare_reload(self) -> None:
        """Put held requests back into the queue, without KV, and drop the cache. Raises
        ServerError: held requests share it, so that it could not be dropped; or KV is stored
        outside of its memory, where a flush leaves it.
        """
        if storage := (await self._info()).get("hicache_storage_backend"):
            raise ServerError(
                f"{self.target.name} stores KV of the old weights in HiCache's {storage}, which "
                "SGLang's flush does not clear",
                hint="start the servers without --hicache-storage-backend",
            )
        if await self._flush():
            return
        await self._pause("retract", None)  # they recompute it, under the new weights
        if not await self._flush() and not (await self._info()).get("disable_radix_cache"):
            raise ServerError(
                f"{self.target.name} holds requests, and SGLang drops no cached KV of the old "
                "weights while it does",
                hint="push with --mode abort or --mode wait; start the servers with "
                "`disable-radix-cache: true`; or use SGLang 0.5.21 or newer",
            )

    async def reset_caches(self) -> None:
        """See `prepare_reload`. Raises ServerError if KV of other weights may be left."""
        await self.prepare_reload()

    # weights

    async def reload_weights(self, path: str, *, timeout_s: float | None = None) -> None:
        """A cache that could not be dropped would end the server: `reset_caches` drops it."""
        body = {"model_path": path, "flush_cache": False}
        await self._call("POST", keeper.FROM_DISK, json=body, timeout_s=timeout_s)

    async def init_weight_transfer(
        self, init_info: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> None:
        """Leave the groups of earlier senders, and join this one's; a no-op for CUDA IPC."""
        if not init_info:
            return
        state = await self._kept("join a group")
        for group in sorted(state.groups):
            if group.startswith(GROUP_PREFIX):
                await self._leave_group(group, timeout_s)
        await self._call("POST", keeper.INIT_GROUP, json=dict(init_info), timeout_s=timeout_s)

    async def _leave_group(self, group: str, timeout_s: float | None) -> None:
        """SGLang has left it even if it reports that it failed to destroy it."""
        body = {"group_name": group}
        with ignoring_status(400):
            await self._call("POST", keeper.DESTROY_GROUP, json=body, timeout_s=timeout_s)

    async def start_weight_update(self, *, timeout_s: float | None = None) -> None:
        """An update has the same preconditions as a reload. Before 0.5.21 SGLang has no sessions,
        and only this object knows that one is open. One that a sender left open is closed.
        """
        await self.prepare_reload()
        with ignoring_status(404):
            try:
                await self._session(keeper.BEGIN, timeout_s)
            except ServerError as error:
                if error.status != 400:
                    raise
                await self._session(keeper.END, timeout_s)
                await self._session(keeper.BEGIN, timeout_s)
        self._updates = True

    async def update_weights(
        self,
        update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        timeout_s: float | None = None,
    ) -> None:
        assert isinstance(update_info, Mapping)  # only vLLM's trainers send several
        path = keeper.FROM_GROUP if "group_name" in update_info else keeper.FROM_TENSOR
        await self._call("POST", path, json=dict(update_info), timeout_s=timeout_s)

    async def finish_weight_update(
        self, weight_version: str | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Also of an update that another sender left open, where SGLang has sessions."""
        own, self._updates = self._updates, False
        try:
            await self._session(keeper.END, timeout_s)
        except ServerError as error:
            if own and error.status == 404:
                return
            if not own and (error.status == 404 or _NO_SESSION in error.message):
                error.refusal = Refusal.NO_SESSION
            raise

    async def weight_version(self) -> str | None:
        version = (await self._object("GET", "/model_info")).get("weight_version")
        return None if version is None else str(version)

    async def set_weight_version(self, version: str, earlier: Sequence[str] = ()) -> bool:
        body = {"new_version": version, "abort_all_requests": False}  # it aborts by default
        await self._call("POST", "/update_weight_version", json=body)
        return True

    async def weight_checksums(self, *, timeout_s: float | None = None) -> dict[str, str] | None:
        """Checksum per parameter of every rank: `tp1.pp0.NAME`. None if a rank is missing: SGLang
        asks its first pipeline stage alone. Raises ServerError: data-parallel ranks differ.
        """
        path, body = "/weights_checker", {"action": "checksum"}
        ranks = (await self._object("POST", path, json=body, timeout_s=timeout_s)).get("ranks")
        everywhere, within = await self.ranks()
        copies = everywhere // within
        return self._understood(path, lambda: self._by_rank(ranks, copies) if ranks else None)

    def _by_rank(self, ranks: Sequence[Mapping[str, Any]], copies: int) -> dict[str, str] | None:
        places, checksums = [_place(rank) for rank in ranks], dict[str, str]()
        # `dp_size` there is that of attention, 1 where whole copies of the model are parallel
        sizes = {"tp": places[0]["tp_size"], "pp": places[0]["pp_size"], "dp": copies}
        for kind, size in sizes.items():
            if {at[f"{kind}_rank"] for at in places} != set(range(size)):
                return None
        ranks_seen = {tuple(at[f"{kind}_rank"] for kind in sizes) for at in places}
        if places[0]["dp_size"] == 1 and len(ranks_seen) < math.prod(sizes.values()):
            return None
        for rank, at in zip(ranks, places, strict=True):
            for name, checksum in rank["checksums"].items():
                place = f"tp{at['tp_rank']}.pp{at['pp_rank']}.{name}"
                if checksums.setdefault(place, checksum) != checksum:
                    raise ServerError(
                        f"{self.target.name}: data-parallel ranks hold different weights: {name}"
                    )
        return checksums

    async def collective_rpc(
        self, method: str, kwargs: Arguments | None = None, *, timeout_s: float | None = None
    ) -> list[Any]:
        self._lacks("workers with skyctl's methods", Refusal.NO_METHOD)

    async def extension_rpc(self, method: str, *, timeout_s: float | None = None) -> None:
        """A no-op: there are no workers with skyctl's methods."""

    async def nccl_reports(self, *, timeout_s: float | None = None) -> list[Any]:
        """Workers inherit the front end's variables. They do not say whether NCCL works: the sender
        finds out, by the same torch.
        """
        state = await self._state()
        return [] if state is None else [{"problem": "", "settings": dict(state.nccl)}]

    # requests

    async def _drain(self, timeout_s: float) -> None:
        """Pause once nothing runs."""
        ends = asyncio.get_running_loop().time() + timeout_s
        if await self.is_paused():
            if not await self._idle(await self._state()):
                raise ServerError(
                    f"{self.target.name} is paused and holds requests, which cannot end",
                    hint="skyctl resume, or: skyctl pause --mode abort",
                )
            return
        while True:
            if await self._idle(await self._state()):
                async with self._resumed_on_failure(paused=False):
                    await self._pause("in_place", None)
                    if await self._flush():  # fails if requests came in between
                        return
                await self.resume()
            if asyncio.get_running_loop().time() + POLL_S > ends:
                raise DeadlineExceeded(
                    f"{self.target.name} was not idle within {timeout_s:g} s, and runs on: SGLang "
                    "holds no new requests back while it waits for those that run"
                )
            await asyncio.sleep(POLL_S)

    async def _flush(self) -> bool:
        """Drop the KV cache; False while requests run or are held. Of data-parallel ranks SGLang
        answers only what the first said: it counts where none has requests.
        """
        everywhere, within = await self.ranks()
        if everywhere > within and not await self._idle(await self._state()):
            return False
        with ignoring_status(400):
            await self._text("POST", "/flush_cache")
            return True
        return False

    async def _pause(self, mode: str, timeout_s: float | None) -> None:
        await self._call("POST", keeper.PAUSE, json={"mode": mode}, timeout_s=timeout_s)


def _place(rank: Mapping[str, Any]) -> Mapping[str, int]:
    """A rank's numbers; from 0.5.21 on there is one entry for each model that it runs."""
    info = rank["parallelism_info"]
    place: Mapping[str, int] = info[0] if isinstance(info, list) else info
    return place


def settings_problem(settings: Mapping[str, Any]) -> str:
    """Why a server with these settings, as arguments or as it reports them, must not be pushed to;
    "" if it may.
    """
    named = {name.replace("-", "_"): value for name, value in settings.items()}
    drafts = str(named.get("speculative_algorithm") or "")
    if (named.get("weight_cache_mode") or "off") != "off":
        return (
            "it shares its weights with other servers (weight-cache-mode), and SGLang ends when "
            "they are to change"
        )
    return update_problem(
        moves_experts=bool(named.get("enable_eplb")),
        drafts="" if drafts == "NGRAM" else drafts,  # that one drafts from the tokens themselves
    )
