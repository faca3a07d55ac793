"""The steps of a smoke test, each of which returns a line about what it found, or raises; and the
fleet under test, with its way of generating tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from skyctl import engines
from skyctl.core.registry import FleetRef
from skyctl.core.repeated import published
from skyctl.core.requests import Outcomes, Pause
from skyctl.core.results import WeightsState
from skyctl.core.urls import api_key
from skyctl.errors import ServerError, SkyctlError, WeightsGone
from skyctl.generate.prompts import GenerationRequest
from skyctl.generate.requests import Endpoint, GenerationClient, GenerationResult, RetryPolicy
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushRequest
from skyctl.push.source import BASE
from skyctl.service import connect
from skyctl.service.bring_down import take_down
from skyctl.service.bring_up import begin_up, follow_operation
from skyctl.states import ReplicaState
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.journal import JobState
from skyctl.units import count_of, format_bytes, format_seconds

if TYPE_CHECKING:
    from skyctl.service import FleetService

PROMPT = "The fleet is up and"
TOKENS = 24
PROBE_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 120.0
_IN_FLIGHT_S = 0.3  # tokens still in flight when the pause is answered
_FROZEN_S = 0.7  # a running server makes many tokens in this time
_STREAM_TRIES = 4
_SHORTEST_STREAM = 256


@dataclass(frozen=True)
class SmokeOptions:
    """What to test. `checkpoint` is another one to push; `reuse` tests a running fleet, and leaves
    it up. All steps together take at most `timeout_s` seconds, except `down`.
    """

    checkpoint: str | None = None
    reuse: bool = False
    timeout_s: float = 900.0
    keep_logs: Path | None = None


@dataclass
class FleetUnderTest:
    """One run. The steps fill in its fields."""

    ref: FleetRef
    """The fleet."""
    options: SmokeOptions
    """What to test."""
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    """Where each server and the router answer."""
    longest: int = 512
    """The longest context of the servers, in tokens."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    """The greedy tokens of each server before the first push."""
    weights: FleetWeights | None = None
    """The weights that those were computed with; None if no file is known to have them."""

    async def find_endpoints(self, fleet: FleetService) -> None:
        """Every server and the router, and the model they serve.

        Raises:
            ServerError: a server serves no model.
        """
        urls = await fleet.urls()
        key = api_key(urls.access)
        async with ControlClient() as client:
            for name, url in urls.servers.items():
                target = ServerTarget(name, url, key, self.ref.config.engine)
                server = engines.server(client, target, timeout_s=PROBE_TIMEOUT_S)
                models = await server.models()
                if not models:
                    raise ServerError(f"{name} serves no model")
                self.endpoints[name] = Endpoint(url, models[0], key, server_urls=(url,))
                self.longest = await server.longest_context() or self.longest
        if urls.router:
            model = next(iter(self.endpoints.values())).model
            servers = tuple(urls.servers.values())
            self.endpoints["router"] = Endpoint(urls.router, model, key, server_urls=servers)

    @property
    def servers(self) -> list[str]:
        return [name for name in self.endpoints if name != "router"]

    @property
    def entry(self) -> Endpoint:
        """The router, or the only server there is."""
        return self.endpoints.get("router") or self.endpoints[self.servers[0]]

    async def ask(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Greedy tokens for the same prompt from each of these, asked at once.

        Raises:
            SkyctlError: one of them did not answer with all tokens.
        """
        results = await asyncio.gather(*(self._ask(self.endpoints[name]) for name in names))
        for name, result in zip(names, results, strict=True):
            if result.error:
                raise SkyctlError(f"{name} did not answer a prompt: {result.error}")
            if len(result.token_ids) != TOKENS:
                raise SkyctlError(
                    f"{name} answered {len(result.token_ids)} tokens instead of {TOKENS}"
                )
        return {name: r.token_ids for name, r in zip(names, results, strict=True)}

    async def _ask(self, endpoint: Endpoint) -> GenerationResult:
        # no retries: a fleet that needs them fails the test
        async with GenerationClient(endpoint, retry=RetryPolicy(max_retries=0)) as client:
            return await client.generate_one(greedy(TOKENS), timeout_s=ANSWER_TIMEOUT_S)


def greedy(max_tokens: int) -> GenerationRequest:
    """The test's prompt, answered with exactly this many tokens, always the same ones."""
    body = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return GenerationRequest("smoke", body, prompt=PROMPT)


class Skipped(Exception):
    """A step that does not apply; the message says why."""


class Step(NamedTuple):
    """One step, by its name in reports."""

    name: str
    run: Callable[[FleetUnderTest], Awaitable[str]]


def steps_for(options: SmokeOptions) -> list[Step]:
    """The steps in order; `down` is not among them, because it must always run."""
    steps = [Step("up", up)] if not options.reuse else []
    steps += [
        Step("generate", generate),
        Step("pause-resume", pause_resume),
        Step("push-same", push_base),
    ]
    if options.checkpoint is not None:
        steps += [Step("push-other", push_other), Step("push-back", push_base)]
    return [*steps, Step("verify", verify)]


async def up(run: FleetUnderTest) -> str:
    """Start the fleet from nothing."""
    begun = await begin_up(run.ref)
    async with connect(run.ref) as fleet:
        status = await follow_operation(fleet, begun.operation, lambda status: None)
    operation = status.operation
    assert operation is not None and operation.ended_at is not None  # it has ended
    if operation.error:
        raise SkyctlError(f"up failed: {operation.error}", hint="read the logs of what failed")
    seconds = format_seconds(operation.ended_at - operation.began_at)
    router = " and the router" if status.router is not None else ""
    return f"{count_of(len(status.replicas), 'replica')}{router} ready after {seconds}"


async def generate(run: FleetUnderTest) -> str:
    """Every server and the router answer a prompt."""
    async with connect(run.ref) as fleet:
        await run.find_endpoints(fleet)
        run.weights = weights_now(await fleet.weights())
    answers = await run.ask(list(run.endpoints))
    run.answers = {name: answers[name] for name in run.servers}
    alike = len({tuple(tokens) for tokens in answers.values()}) == 1
    tokens = len(next(iter(answers.values())))
    return f"{tokens} greedy tokens from {_listed(list(answers))}, " + (
        "all the same" if alike else "not all the same"
    )


async def pause_resume(run: FleetUnderTest) -> str:
    """A stream stands still while the fleet is paused, and goes on where it was."""
    length = min(_SHORTEST_STREAM, run.longest // 2)
    async with connect(run.ref) as fleet:
        for _ in range(_STREAM_TRIES):
            frozen = await _freeze_stream(run, fleet, length)
            if frozen is not None:
                return frozen
            # it ended before the pause took effect: try a longer one
            length = min(4 * length, run.longest - 64)
    raise SkyctlError(
        f"no stream of {length} tokens lasted until the fleet was paused",
        hint="a longer max-model-len would allow a longer stream",
    )


async def _freeze_stream(run: FleetUnderTest, fleet: FleetService, length: int) -> str | None:
    """Freeze one stream midway; returns what was seen, or None if it ended too early."""
    texts: list[str] = []
    begun = asyncio.Event()

    def record(text: str) -> None:
        texts.append(text)
        begun.set()

    async with GenerationClient(run.entry, retry=RetryPolicy(max_retries=0)) as client:
        stream = asyncio.create_task(
            client.generate_one(greedy(length), timeout_s=ANSWER_TIMEOUT_S, on_text=record)
        )
        stream.add_done_callback(lambda _: begun.set())
        try:
            await begun.wait()
            paused_ms = _slowest(await fleet.pause(Pause(mode="keep", clear_cache=False)), "pause")
            try:
                await asyncio.sleep(_IN_FLIGHT_S)
                if stream.done():
                    _finished(stream.result(), length)
                    return None
                before = len(texts)
                await asyncio.sleep(_FROZEN_S)
                if len(texts) != before or stream.done():
                    raise SkyctlError("tokens arrived while the fleet was paused")
                running = [
                    r.name
                    for r in (await fleet.status()).replicas
                    if r.state is not ReplicaState.PAUSED
                ]
                if running:
                    raise SkyctlError(f"{', '.join(running)} is not paused after a pause")
            finally:
                resumed = await fleet.resume()
            resumed_ms = _slowest(resumed, "resume")
            result = await stream
        finally:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
    _finished(result, length)
    return (
        f"paused in {paused_ms:.0f} ms, resumed in {resumed_ms:.0f} ms; a stream of "
        f"{length} tokens stood still in the middle and then ended"
    )


async def push_other(run: FleetUnderTest) -> str:
    """Another checkpoint arrives on every server."""
    assert run.options.checkpoint is not None  # the step is planned only then
    if run.options.reuse:
        await _same(run)  # or nothing could bring back what they have
    message = await _push(run, PushRequest(run.options.checkpoint))
    answers = await run.ask(run.servers)
    changed = sum(answers[name] != run.answers[name] for name in run.servers)
    return f"{message}; answers changed on {changed} of {len(run.servers)} servers"


async def push_base(run: FleetUnderTest) -> str:
    """A push of the weights that gave the first answers, under their label, brings the same ones,
    whatever the fleet runs now.
    """
    message = await _push(run, await _same(run))
    answers = await run.ask(run.servers)
    changed = [name for name in run.servers if answers[name] != run.answers[name]]
    if changed:
        raise SkyctlError(
            f"{', '.join(changed)} answers differently with the same checkpoint",
            hint="compare the servers: skyctl weights verify",
        )
    return f"{message}; every answer as before"


async def _same(run: FleetUnderTest) -> PushRequest:
    """The push of the weights that gave the first answers. Raises Skipped: they are in no file."""
    if run.weights is None:
        raise Skipped("no file is known to have the weights of these servers")
    try:
        return await asyncio.to_thread(published, run.weights)
    except WeightsGone as error:
        raise Skipped(error.message) from error


async def verify(run: FleetUnderTest) -> str:
    """Every server digests its weights, and they agree."""
    async with connect(run.ref) as fleet:
        report = await fleet.verify_weights()
    silent = [row.server for row in report.servers if not row.ok]
    if silent:
        raise SkyctlError(f"{', '.join(silent)} did not answer", hint="skyctl weights verify")
    if report.agree is False:
        raise SkyctlError("the servers hold different weights", hint="skyctl weights verify")
    if report.agree is None:
        raise Skipped("not every server can digest its weights")
    return f"{len(report.servers)} servers hold the same weights"


async def down(run: FleetUnderTest) -> str:
    """The fleet stops and leaves no process."""
    async with connect(run.ref) as fleet:
        rows = (await fleet.processes()).rows
    config = run.ref.config
    done = await take_down(
        run.ref.paths, drain_timeout_s=config.drain_timeout_s, stop_timeout_s=config.stop_timeout_s
    )
    identities = [identity for row in rows for identity in (row.identity, *row.descendants)]
    surviving = {process.pid for process in identities if process is not None and process.alive()}
    if surviving:
        pids = ", ".join(map(str, surviving))
        raise SkyctlError(f"processes were left: {pids}", hint=f"look at them: ps -p {pids}")
    return f"stopped {_listed(list(done.stopped)) if done.stopped else 'nothing'}"


async def _push(run: FleetUnderTest, request: PushRequest) -> str:
    async with connect(run.ref) as fleet:
        job_id = await fleet.start_push(request)
        job = await fleet.wait_job(job_id)
    if job.state is not JobState.SUCCEEDED or job.result is None:
        error: dict[str, Any] = job.error or {}
        message = error.get("message") or f"{job_id} ended {job.state}"
        raise SkyctlError(f"{job_id}: {message}", hint=error.get("hint", ""))
    result = job.result
    return (
        f"{result['version']}: {format_bytes(result['total_bytes'])} by {result['transport']}, "
        f"frozen for {format_seconds(result['freeze_window_s'])}"
    )


def weights_now(recorded: WeightsState) -> FleetWeights | None:
    """What every server has, as recorded; None if they differ, or no file is known to have it."""
    given = {(r.weight_version, r.checkpoint, r.checkpoint_digest) for r in recorded.servers}
    if len(given) != 1:
        return None
    [(version, checkpoint, digest)] = given
    if version is None:
        return FleetWeights(BASE, recorded.base, recorded.base_digest) if recorded.base else None
    if not checkpoint:
        return None
    push = next((p for p in recorded.pushes if p.ok and p.version == version), None)
    if push is None:
        return FleetWeights(version, checkpoint, digest)
    return FleetWeights(
        version,
        checkpoint,
        digest,
        content_digest=push.content_digest,
        draft=push.draft,
        draft_digest=push.draft_digest,
    )


def _finished(result: GenerationResult, length: int) -> None:
    if result.error or len(result.token_ids) != length:
        got = f"{len(result.token_ids)} of {length} tokens"
        raise SkyctlError(f"the stream was not finished ({got}): {result.error or 'it was cut'}")


def _slowest(outcomes: Outcomes, verb: str) -> float:
    """Milliseconds of the slowest server. Raises if one of them failed."""
    for outcome in outcomes:
        if not outcome.ok:
            raise SkyctlError(f"{verb}: {outcome.server}: {outcome.detail or outcome.status}")
    return max(outcome.elapsed_ms for outcome in outcomes)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
