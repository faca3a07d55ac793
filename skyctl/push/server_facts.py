"""What servers report of themselves before a push, and which of it refuses one."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyctl import engines
from skyctl.checkpoints.checkpoint import config_of
from skyctl.engines.base import Feature, Server, lacks_method
from skyctl.engines.dialect import Dialect
from skyctl.errors import PreflightError, ServerError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import fan_out, require_all
from skyctl.http.target import ServerTarget
from skyctl.launch.base import Node
from skyctl.push.request import PushFleet, PushServer
from skyctl.transfer.sender_client import shared_settings
from skyctl.wire.worker import WorkerMethod

_NCCL_TIMEOUT_S = 30.0
_MOST = 4096
_FEW_CHANNELS = 8
"""With fewer channels NVLink is far from saturated; NCCL's own choice is 16 and more."""


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """What one server reported of itself that cannot change while its process lives. Empty
    strings where it does not say."""

    backend: str
    """The weight-transfer backend it was started with."""
    vllm_version: str
    """Its engine's version."""
    ranks: tuple[int, int]
    """The workers of all data-parallel ranks, and those of one."""
    model: str = ""
    """The directory or hub id it was started with."""
    load_format: str = ""
    """How it loaded the weights."""
    nccl_problem: str = ""
    """Why it cannot use NCCL."""
    nccl_settings: Mapping[str, str] | None = None
    """NCCL's variables in its workers; None if it does not report them."""
    update_problem: str = ""
    """Why its model must not be updated."""
    drafts: str = ""
    """See `StartedWith`."""
    draft_model: str = ""
    """See `StartedWith`."""
    kv_lease_s: float = 0.0
    """See `StartedWith`."""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """All that one server reported of itself."""

    name: str
    """Its name."""
    url: str
    """Its URL."""
    dialect: Dialect | None
    """How tensors are announced to it; None for engines that only reload."""
    paused: bool
    """It is paused."""
    sleep_level: int | None
    """The level at which it sleeps, 0 if it is awake; None for one that is paused and does not say.
    """
    weight_version: str | None
    """The label of its weights."""
    process: ProcessFacts
    """What cannot change while it lives."""
    title: str = "vLLM"
    """Its engine's name."""

    @property
    def asleep(self) -> bool:
        """Whether it is known to sleep."""
        return bool(self.sleep_level)

    def to_json(self) -> dict[str, Any]:
        return {
            "server": self.name,
            "vllm": self.process.vllm_version,
            "backend": self.process.backend or "none",
            "workers": self.process.ranks[0],
            "state": "asleep" if self.asleep else "paused" if self.paused else "ready",
            "weight_version": self.weight_version,
        }


async def ask_servers(fleet: PushFleet, *, client: ControlClient) -> tuple[ServerFacts, ...]:
    """Facts of every server, in fleet order.

    Raises:
        UsageError: their engine takes no pushes.
        ServerError: some or all do not answer.
    """
    by_target = {server.target: server for server in fleet.servers}

    async def ask(target: ServerTarget) -> ServerFacts:
        server = engines.server(client, target, timeout_s=fleet.timeouts.control_s)
        (paused, sleeping), weight_version, made = await gather(
            gather(server.is_paused(), server.is_sleeping()),
            server.weight_version(),
            _make(server, by_target[target], fleet),
        )
        # asked once the engine has answered: a sleep under way has ended
        level = (await server.metrics()).sleep_level
        if level is None and not paused:  # a paused engine reports that it is asleep
            level = int(sleeping)
        engine = engines.ENGINES[target.engine]
        dialect = engine.transfer.dialect
        return ServerFacts(
            name=target.name,
            url=target.url,
            dialect=None if dialect is None else dialect(made.vllm_version),
            paused=paused,
            sleep_level=level,
            weight_version=weight_version,
            process=made,
            title=engine.title,
        )

    targets = [server.target for server in fleet.servers]
    for name in {target.engine for target in targets}:
        engines.require(name, Feature.PUSH)
    outcomes = await fan_out(targets, ask, timeout_s=fleet.timeouts.control_s)
    require_all(outcomes, "sync-weights")
    return tuple(outcome.value for outcome in outcomes if outcome.value is not None)


_makes: dict[tuple[str, bool], ProcessFacts] = {}
"""By `PushServer.instance`, and whether its NCCL settings were asked for: a trainer pushes to the
same processes repeatedly, and the configuration alone costs vLLM longer than all other questions.
"""


async def _make(server: Server, pushed: PushServer, fleet: PushFleet) -> ProcessFacts:
    relays = fleet.reading.one_reader
    made_before = _makes.get((pushed.instance, relays))
    if made_before is not None:
        return made_before
    ranks = await server.ranks()  # the questions to its workers need these
    version, started, update_problem = await gather(
        server.version(), server.started_with(), _update_problem(server)
    )
    update_problem = update_problem or started.update_problem
    if not update_problem:
        update_problem = started.config_problem(config_of(fleet.model_path, started.model))
    # what it says it was started with, else what the fleet records
    backend = pushed.backend if started.backend is None else started.backend
    problem, settings = await _nccl(server) if backend == "nccl" or relays else ("", None)
    made = ProcessFacts(
        backend=backend,
        vllm_version=version,
        ranks=ranks,
        model=started.model,
        load_format=started.load_format,
        nccl_problem=problem,
        nccl_settings=settings,
        update_problem=update_problem,
        drafts=started.drafts,
        draft_model=started.draft_model,
        kv_lease_s=started.kv_lease_s,
    )
    if pushed.instance and not update_problem:  # the next step may be to download its config.json
        if len(_makes) >= _MOST:
            _makes.clear()
        _makes[pushed.instance, relays] = made
    return made


async def _update_problem(server: Server) -> str:
    """Why updates would leave wrong weights in its workers; "" if they would not, or if it was
    started without skyctl's worker extension.
    """
    try:
        answers = await server.ask_workers(WorkerMethod.UPDATE_PROBLEM, timeout_s=_NCCL_TIMEOUT_S)
    except ServerError as error:
        if not lacks_method(error):
            raise
        return ""
    return next((str(answer) for answer in answers if answer), "")


async def _nccl(server: Server) -> tuple[str, Mapping[str, str] | None]:
    """The problem of the first worker that has one, and the settings."""
    try:
        answers = await server.nccl_reports(timeout_s=_NCCL_TIMEOUT_S)
    except ServerError as error:
        if not error.status:
            raise
        return "", None  # started without skyctl's worker extension
    reports = [answer for answer in answers if isinstance(answer, dict)]
    problem = next((str(answer["problem"]) for answer in reports if answer.get("problem")), "")
    settings = reports[0].get("settings") if reports else None  # all workers share one environment
    if not isinstance(settings, dict):
        return problem, None
    return problem, {str(key): str(value) for key, value in settings.items()}


def check_servers(facts: Sequence[ServerFacts], weights_awake: Collection[str] = ()) -> list[str]:
    """Check that servers, or at least their weights, are awake, and of one version; returns notes.

    Raises:
        PreflightError: names the servers that are not.
    """
    asleep = [fact.name for fact in facts if fact.asleep and fact.name not in weights_awake]
    if asleep:
        raise PreflightError(
            f"{', '.join(asleep)} {'is' if len(asleep) == 1 else 'are'} asleep",
            hint="wake the weights as a part of it: --colocated; or skyctl wake --tags weights",
        )
    versions = {fact.name: fact.process.vllm_version for fact in facts}
    if len(set(versions.values())) > 1:
        listing = ", ".join(f"{name}: {version}" for name, version in versions.items())
        raise PreflightError(
            f"the servers run different versions of {facts[0].title} ({listing})",
            hint="restart them alike",
        )
    return sorted({fact.dialect.note for fact in facts if fact.dialect and fact.dialect.note})


def refuse_update_problems(facts: Sequence[ServerFacts]) -> None:
    """Raise PreflightError, naming the server, if an update would leave wrong weights."""
    for fact in facts:
        if fact.process.update_problem:
            raise PreflightError(
                f"{fact.name}: {fact.process.update_problem}",
                hint="restart the servers on the checkpoint instead",
            )


def refuse_dummy(facts: Sequence[ServerFacts]) -> None:
    """Raise PreflightError if a server was started with `--load-format dummy`: vLLM cannot reload
    from disk what it did not load from there.
    """
    dummy = [fact.name for fact in facts if fact.process.load_format == "dummy"]
    if dummy:
        raise PreflightError(
            f"{', '.join(dummy)} was started with --load-format dummy, which transport disk "
            "cannot push to",
            hint="push with another transport, or start it without `load-format: dummy`",
        )


def refuse_without_nccl(facts: Sequence[ServerFacts]) -> None:
    """Raise PreflightError if a server's vLLM cannot use NCCL: it would report success and hold
    garbage.
    """
    for fact in facts:
        if fact.process.nccl_problem:
            raise PreflightError(
                f"{fact.name}: {fact.process.nccl_problem}",
                hint="install the nvidia-nccl package that its vLLM asks for, or set "
                "VLLM_NCCL_SO_PATH in its `env:`",
            )


def refuse_shared_gpus(servers: Sequence[PushServer]) -> None:
    """Raise PreflightError if two servers share a GPU: NCCL takes one process on each."""
    by_gpu: dict[tuple[Node | None, int], str] = {}
    for server in servers:
        for gpu in server.gpus:
            which = server.node, gpu
            if (other := by_gpu.setdefault(which, server.target.name)) != server.target.name:
                raise PreflightError(
                    f"{other} and {server.target.name} share GPU {gpu}, and NCCL takes one process "
                    "on each GPU",
                    hint="use `weight_transfer: {transport: ipc}` in the fleet file",
                )


def common_nccl_settings(facts: Sequence[ServerFacts]) -> dict[str, str] | None:
    """NCCL's variables that all servers share (`transfer/sender_client.py`); None if no server
    reports them.

    Raises:
        PreflightError: servers differ, so their group would hang.
    """
    reported = [
        (f.name, shared_settings(f.process.nccl_settings))
        for f in facts
        if f.process.nccl_settings is not None
    ]
    if not reported:
        return None
    (first, settings), *others = reported
    for name, theirs in others:
        if theirs != settings:
            variable = min(dict(theirs.items() ^ settings.items()))
            raise PreflightError(
                f"{first} and {name} differ in {variable} ({_shown(settings, variable)}, "
                f"{_shown(theirs, variable)}): their NCCL group would hang",
                hint="give all servers the same NCCL settings in their `env:`, and "
                "VLLM_BATCH_INVARIANT to all or none",
            )
    return settings


def nccl_pace_notes(settings: Mapping[str, str]) -> list[str]:
    """Settings of NCCL's that make a broadcast slow, in words."""
    channels = settings.get("NCCL_MAX_NCHANNELS", "")
    if channels.isdigit() and int(channels) < _FEW_CHANNELS:
        return [
            f"servers hold NCCL to {channels} channel{'s' if channels != '1' else ''} "
            "(NCCL_MAX_NCHANNELS; VLLM_BATCH_INVARIANT sets it): the push goes at that pace"
        ]
    return []


def _shown(settings: Mapping[str, str], variable: str) -> str:
    return settings.get(variable) or "not set"
