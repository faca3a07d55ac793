"""One vLLM server's control routes, as typed calls."""

from __future__ import annotations

import secrets
from asyncio import gather
from collections.abc import Mapping, Sequence
from typing import Any

from skyctl.engines.base import (
    Arguments,
    Refusal,
    ServedAdapter,
    ServerMetrics,
    StartedWith,
)
from skyctl.engines.http_server import HttpServer, ignoring_status
from skyctl.engines.launches import update_problem
from skyctl.engines.prometheus import samples, server_metrics
from skyctl.engines.vllm.command import draft_reference, drafting
from skyctl.engines.vllm.inside.adapters import IN_FLIGHT, NAMED
from skyctl.errors import ServerError
from skyctl.states import PauseMode
from skyctl.wire.worker import WorkerMethod

_REFUSALS = {
    "without a matching start": Refusal.NO_SESSION,
    "not configured": Refusal.NO_TRANSFER,
    "Model reloading with": Refusal.CANNOT_RELOAD,  # `--load-format dummy` and others
}
_NO_ROUTE = "it has no such route"
_KV_LEASE_S = 30.0
_COUNTS = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_cache_queries": "vllm:prefix_cache_queries_total",
    "prefix_cache_hits": "vllm:prefix_cache_hits_total",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
_USAGE, _SLEEP = "vllm:kv_cache_usage_perc", "vllm:engine_sleep_state"
_BOOLEANS = {"True": True, "False": False}
METRICS = (*_COUNTS.values(), _USAGE, _SLEEP)
"""The metrics that are read; every server has the first from its start."""


class VLLMServer(HttpServer):
    """`Server` (`engines/base.py`) of vLLM. The routes exist only in servers started with
    VLLM_SERVER_DEV_MODE=1, except health, version, models and metrics.
    """

    async def health(self) -> None:
        """Return if the engine has not errored. Succeeds while paused, asleep or stuck."""
        await self._text("GET", "/health")

    async def version(self) -> str:
        return str(await self._field("GET", "/version", "version"))

    async def generates_from_tokens(self) -> bool:
        """Whether `/inference/v1/generate` is served: token ids in, token ids out.

        vLLM 0.32 answers 403 there without `--enable-scale-out`; no version accepts the body sent
        here.
        """
        try:
            await self._call("POST", "/inference/v1/generate", json={})
        except ServerError as error:
            if not error.status:
                raise
            return error.status not in (403, 404)
        return True

    async def ranks(self) -> tuple[int, int]:
        if self.known_ranks is None:
            everywhere, within = await gather(self._world_size("true"), self._world_size("false"))
            self.known_ranks = everywhere, within
        return self.known_ranks

    async def _world_size(self, include_dp: str) -> int:
        params = {"include_dp": include_dp}
        size = await self._field("GET", "/get_world_size", "world_size", params=params)
        return self._understood("/get_world_size", lambda: int(size))

    async def started_with(self) -> StartedWith:
        with ignoring_status():
            parts = await self.collective_rpc(WorkerMethod.STARTED_WITH)
            return read_start(parts[0] if parts else None)
        with ignoring_status():  # has it all, but takes seconds first: it lists what is installed
            return read_start((await self.server_info()).get("vllm_config"))
        return read_start(None)

    async def server_info(self) -> dict[str, Any]:
        """vLLM's configuration (`vllm_config`), environment and system, as JSON."""
        return await self._object("GET", "/server_info", params={"config_format": "json"})

    async def metrics(self) -> ServerMetrics:
        """Load of the server, summed over its engines. Asks for the few metrics it needs.

        The whole page is about 75 kB, and costs the server several times as much to write.
        """
        page = ""
        with ignoring_status():
            # with the slash prometheus_client's own app answers, and that one can select
            page = await self._text("GET", "/metrics/", params={"name[]": METRICS})
        # a server of several processes (--api-server-count) cannot select, and returns nothing
        if METRICS[0] not in page:
            page = await self._text("GET", "/metrics")
        return parse_metrics(page)

    async def is_paused(self) -> bool:
        return bool(await self._field("GET", "/is_paused", "is_paused"))

    async def pause(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """vLLM ignores `clear_cache` with mode keep."""
        params = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        await self._call("POST", "/pause", params=params, timeout_s=timeout_s)

    async def resume(self) -> None:
        await self._call("POST", "/resume")

    async def is_sleeping(self) -> bool:
        """vLLM's answer, which is also True for an engine that is only paused."""
        return bool(await self._field("GET", "/is_sleeping", "is_sleeping"))

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        await self._call("POST", "/sleep", params={"level": level, "mode": mode})

    async def wake(self, tags: Sequence[str] = ()) -> bool:
        """A full wake also resumes an engine that was paused before it slept."""
        params = {"tags": list(tags)} if tags else None
        answer = await self._call("POST", "/wake_up", params=params)
        if isinstance(answer, dict) and "status" in answer:
            return bool(answer["status"] == "awake")
        # an older one (0.26) does not say; it is asleep, or paused, until all of it is awake
        return not tags or not await self.is_sleeping()

    async def prepare_reload(self) -> None:
        """A no-op: held requests can release their KV at any time."""

    async def reset_caches(self) -> None:
        """Drop everything computed with other weights: KV blocks, here and in what a KV connector
        keeps elsewhere, and outputs of encoders (of images). Raises ServerError: some is left.
        """
        done = await self.reset_prefix_cache()
        if not done:
            # frozen requests hold blocks: they go back to the queue with the tokens they have
            done = await self.reset_prefix_cache(reset_running=True)
        if not done:
            raise ServerError(
                f"{self.target.name}: KV blocks of other weights are still cached: "
                f"{self.target.url}/reset_prefix_cache answered success: false"
            )
        with ignoring_status(404):  # a version without this route
            await self._call("POST", "/reset_encoder_cache")

    async def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Drop cached KV blocks, including those that a KV connector keeps elsewhere. False while
        requests hold blocks, or if the connector did not do it; may be repeated.

        With `reset_running` the requests that hold blocks are put back in the queue: they keep
        their tokens and recompute their KV when they are next scheduled.
        """
        params = {"reset_external": "true"}
        if reset_running:
            params["reset_running_requests"] = "true"
        return bool(await self._field("POST", "/reset_prefix_cache", "success", params=params))

    async def collective_rpc(
        self, method: str, kwargs: Arguments | None = None, *, timeout_s: float | None = None
    ) -> list[Any]:
        """One result per worker; vLLM makes all but containers text: booleans are read back."""
        body = {"method": method, "kwargs": dict(kwargs or {})}
        try:
            answer = await self._call("POST", "/collective_rpc", json=body, timeout_s=timeout_s)
        except ServerError as error:
            # any other error, above all one raised by the method itself, does not mean that
            methods = (method, (kwargs or {}).get("method"))
            # the multiprocess executor reports it in Python's own words
            words = "Method '{}' is not implemented", "object has no attribute '{}'"
            if any(phrase.format(name) in error.message for phrase in words for name in methods):
                error.refusal = Refusal.NO_METHOD
            raise
        results = answer.get("results") if isinstance(answer, dict) else None
        sent = self._understood("/collective_rpc", lambda: list(results or []))
        return [_BOOLEANS.get(each, each) if isinstance(each, str) else each for each in sent]

    async def ask_workers(
        self, method: str, kwargs: Arguments | None = None, *, timeout_s: float | None = None
    ) -> list[Any]:
        """Answers by data-parallel rank, then by rank within it. /collective_rpc alone would return
        only the first data-parallel rank's (`inside/answers.py`).

        Raises:
            ServerError: an answer is missing, or the method failed on one of the workers.
        """
        everywhere, within = await self.ranks()
        if everywhere == within:
            answers = await self.collective_rpc(method, kwargs=kwargs, timeout_s=timeout_s)
            by_place = {(0, rank): answer for rank, answer in enumerate(answers)}
        else:
            nonce = secrets.token_hex(16)
            question = {"nonce": nonce, "method": method, "kwargs": dict(kwargs or {})}
            await self.collective_rpc(
                WorkerMethod.KEEP_ANSWER, kwargs=question, timeout_s=timeout_s
            )
            kept = await self.collective_rpc(WorkerMethod.KEPT_ANSWERS, kwargs={"nonce": nonce})
            by_place = self._understood(
                "/collective_rpc",
                lambda: {tuple(each["rank"]): each["answer"] for each in kept[0]},
            )
        places = [(copy, rank) for copy in range(everywhere // within) for rank in range(within)]
        for copy, rank in places:
            if (copy, rank) not in by_place:
                raise ServerError(
                    f"{self.target.name}: could not look at rank {copy}: no answer of its worker "
                    f"{rank} (data-parallel ranks on other machines, or behind servers of their "
                    "own, are not supported)"
                )
        if len(by_place) > len(places):
            raise ServerError(
                f"{self.target.name}: {len(by_place)} workers answered, and it had {len(places)}: "
                "its process is another one"
            )
        return [by_place[place] for place in places]

    async def adapters(self) -> list[ServedAdapter]:
        data = await self._field("GET", "/v1/models", "data")
        return self._understood(
            "/v1/models",
            lambda: [
                ServedAdapter(model["id"], model["root"], model.get("owned_by") == IN_FLIGHT)
                for model in data
                if model.get("parent")
            ],
        )

    async def load_adapter(self, name: str, path: str) -> None:
        """Needs --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in the server's environment.
        vLLM reads the directory again after it has dropped the adapter.
        """
        await self._load_adapter({"lora_name": name, "lora_path": path})

    async def name_adapter(self, name: str, loaded: str) -> None:
        """See `inside/adapters.py`, which must be loaded in the server."""
        try:
            body = {"lora_name": name, "lora_path": f"{NAMED}{loaded}", "load_inplace": True}
            await self._load_adapter(body)
        except ServerError as error:
            if NAMED in error.message:  # an unpatched vLLM looks for a directory of that name
                error.refusal = Refusal.CANNOT_NAME
            raise

    async def unload_adapter(self, name: str) -> None:
        """An adapter that is not there counts as unloaded."""
        try:
            await self._text("POST", "/v1/unload_lora_adapter", json={"lora_name": name})
        except ServerError as error:
            if error.status != 404 or "cannot be found" not in error.message:
                raise

    async def _load_adapter(self, body: Mapping[str, Any]) -> None:
        try:
            await self._text("POST", "/v1/load_lora_adapter", json=body)
        except ServerError as error:
            if error.status == 404 and error.message.endswith(_NO_ROUTE):
                error.refusal = Refusal.NO_ADAPTERS
            raise

    async def init_weight_transfer(
        self, init_info: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> None:
        body = {"init_info": dict(init_info)}
        await self._call("POST", "/init_weight_transfer_engine", json=body, timeout_s=timeout_s)

    async def start_weight_update(self, *, timeout_s: float | None = None) -> None:
        await self._call("POST", "/start_weight_update", timeout_s=timeout_s)

    async def update_weights(
        self,
        update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        timeout_s: float | None = None,
    ) -> None:
        body = {"update_info": update_info}
        await self._call("POST", "/update_weights", json=body, timeout_s=timeout_s)

    async def finish_weight_update(
        self, weight_version: str | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Stage 4 of a push. Give a version only if `Dialect.labels_at_finish`."""
        body = None if weight_version is None else {"weight_version": weight_version}
        await self._call("POST", "/finish_weight_update", json=body, timeout_s=timeout_s)

    async def weight_version(self) -> str | None:
        with ignoring_status(404):
            return str(await self._field("GET", "/weight_info", "weight_version"))
        return None

    async def set_weight_version(self, version: str, earlier: Sequence[str] = ()) -> bool:
        """vLLM takes no `earlier`: `inside/versions.py` reads it."""
        body = {"new_version": version, "earlier": list(earlier)}
        with ignoring_status(404):
            await self._call("POST", "/update_weight_version", json=body)
            return True
        return False

    async def extension_rpc(self, method: str, *, timeout_s: float | None = None) -> None:
        try:
            await self.collective_rpc(method, timeout_s=timeout_s)
        except ServerError as error:
            if error.refusal != Refusal.NO_METHOD:
                raise

    async def nccl_reports(self, *, timeout_s: float | None = None) -> list[Any]:
        return await self.collective_rpc(WorkerMethod.NCCL, timeout_s=timeout_s)

    async def reload_weights(self, path: str, *, timeout_s: float | None = None) -> None:
        """The extension checks and completes what vLLM's own reload leaves out."""
        await self.extension_rpc(WorkerMethod.WATCH_RELOAD, timeout_s=timeout_s)
        try:
            await self.collective_rpc(
                "reload_weights", kwargs={"weights_path": path}, timeout_s=timeout_s
            )
        except ServerError as error:
            if error.refusal != Refusal.CANNOT_RELOAD:
                raise
            message = f"{error.message}; start the server without --load-format dummy"
            again = ServerError(message, status=error.status)
            again.refusal = error.refusal
            raise again from error
        await self.extension_rpc(WorkerMethod.REPACK_TIED, timeout_s=timeout_s)

    async def weight_checksums(self, *, timeout_s: float | None = None) -> dict[str, str] | None:
        """None without such a route. On CPU it hashes nothing for linear layers: no proof there."""
        path, body = "/weight_checker", {"action": "checksum"}
        with ignoring_status(404):
            content = await self._object("POST", path, json=body, timeout_s=timeout_s)
            return self._understood(path, lambda: dict(content["checksums"]))
        return None

    async def _call(self, method: str, path: str, **how: Any) -> Any:
        try:
            return await super()._call(method, path, **how)
        except ServerError as error:
            for words, refusal in _REFUSALS.items():
                if words in error.message:
                    error.refusal = refusal
            if error.status == 404 and error.message.endswith(_NO_ROUTE):
                raise ServerError(
                    f"{error.message}; vLLM needs VLLM_SERVER_DEV_MODE=1 for its control routes",
                    status=404,
                    hint="start the server with VLLM_SERVER_DEV_MODE=1 in its environment",
                ) from error
            raise


def parse_metrics(text: str) -> ServerMetrics:
    """Read vLLM's `/metrics` page. Missing metrics count as zero."""
    measured = list(samples(text, "vllm:"))
    sleep_samples = [(labels, on > 0) for name, labels, on in measured if name == _SLEEP]
    asleep = {labels.get("sleep_state") for labels, on in sleep_samples if on}
    level = 2 if "discard_all" in asleep else 1 if "weights_offloaded" in asleep else 0
    return server_metrics(measured, _COUNTS, _USAGE, level if sleep_samples else None)


def read_start(config: Any) -> StartedWith:
    """From vLLM's configuration as JSON, or parts of it."""

    def section(name: str) -> dict[str, Any]:
        part = config.get(name) if isinstance(config, dict) else None
        return part if isinstance(part, dict) else {}

    described = isinstance(config, dict) and "weight_transfer_config" in config
    return StartedWith(
        str(section("model_config").get("model") or ""),
        str(section("load_config").get("load_format", "")),
        str(section("weight_transfer_config").get("backend", "")) if described else None,
        _kv_lease_s(section("kv_transfer_config")),
        update_problem(moves_experts=bool(section("parallel_config").get("enable_eplb"))),
        drafting(section("speculative_config")),
        draft_reference(section("speculative_config")),
        tuple(map(str, section("lora_config").get("target_modules") or ())),
    )


def _kv_lease_s(transfer: Mapping[str, Any]) -> float:
    """vLLM counts a request whose KV waits for a decode server as work, and answers a pause,
    whatever its mode, only once that is fetched or its lease is over (`nixl/base_worker.py`,
    default 30 s).
    """
    if transfer.get("kv_role") != "kv_producer":
        return 0.0
    extra = transfer.get("kv_connector_extra_config")
    lease_s = extra.get("kv_lease_duration") if isinstance(extra, Mapping) else None
    return float(lease_s) if isinstance(lease_s, int | float) else _KV_LEASE_S
