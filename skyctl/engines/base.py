"""What an inference engine is to skyctl: its command line, its server's routes, its messages.

Nothing outside `engines/` names a route, a flag, a variable, a metric or an error text of an
engine. docs/adding.md explains how to add one.
"""

from __future__ import annotations

from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from skyctl.engines.dialect import Dialect
from skyctl.engines.launches import (
    NOTHING_RESERVED,
    Command,
    Device,
    Reserved,
    RouterLaunch,
    ServerLaunch,
    Sizes,
)
from skyctl.states import PauseMode

if TYPE_CHECKING:
    from skyctl.engines.traffic import ServerTraffic
    from skyctl.errors import ServerError
    from skyctl.http.client import ControlClient
    from skyctl.http.target import ServerTarget

Arguments = Mapping[str, Any]
"""Arguments of a method of skyctl's worker extension, by name."""


class Feature(StrEnum):
    """A feature that an engine may lack. What needs it is refused before anything is touched."""

    SLEEP = "sleep and wake"
    PUSH = "weight pushes"
    ADAPTERS = "LoRA adapters"
    COMPARISON = "comparison of weights with a checkpoint"
    PAIRS = "prefill and decode servers"
    SPAN = "parts on several machines (`nodes_per_replica`)"


class Refusal(StrEnum):
    """The meaning of a server's error, where skyctl reacts to it (`ServerError.refusal`)."""

    NO_METHOD = "its workers have no such method"
    NO_SESSION = "no update is open"
    NO_TRANSFER = "no weight transfer is configured"
    CANNOT_RELOAD = "it cannot reload what it did not load from disk"
    CANNOT_NAME = "it cannot give names to adapters: it runs without skyctl's plug-in"
    NO_ADAPTERS = "it was not started to take LoRA adapters"
    FROZEN_BY_ANOTHER = "another fleet froze it, and alone changes it"


REFUSED_WHILE_PAUSED = "Generation is paused"
"""How a server refuses requests in a pause, where it does (vLLM 0.33 without skyctl's gate)."""


NO_TOKEN_IDS = "return_token_ids is not supported with streaming"
"""How a server refuses to stream a chat with its token ids (SGLang from 0.5.17 on)."""


def lacks_method(error: ServerError) -> bool:
    """Whether workers answered that they have no such method. Any other error, above all one raised
    by the method itself, does not say that.
    """
    return error.refusal == Refusal.NO_METHOD


# --- a server -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerMetrics:
    """One server's load, summed over its engines. Counters begin at its start."""

    running: int = 0
    """Requests that generate."""
    waiting: int = 0
    """Requests in the queue."""
    kv_usage: float = 0.0
    """Share of the KV cache in use, 0..1: the mean over engines."""
    prompt_tokens: int = 0
    """Counter of prompt tokens."""
    generation_tokens: int = 0
    """Counter of generated tokens."""
    prefix_cache_queries: int = 0
    """Counter of tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Counter of tokens that it had."""
    draft_tokens: int = 0
    """Counter of tokens that speculative decoding proposed."""
    accepted_tokens: int = 0
    """Counter of those that the model accepted."""
    sleep_level: int | None = None
    """0 awake, 1 or 2 asleep, None if the server does not say."""
    measured: bool = True
    """Whether it counts requests at all: vLLM does not with --disable-log-stats."""

    def load(self) -> dict[str, Any]:
        """The load itself, as a ReplicaStatus takes it."""
        fields = dict(vars(self))
        del fields["sleep_level"], fields["measured"]
        return fields

    @property
    def in_flight(self) -> int:
        """Requests that are running or waiting: zero means drained."""
        return self.running + self.waiting


@dataclass(frozen=True)
class ServedAdapter:
    """A LoRA adapter of a server. `in_flight`: its name has moved to another, and requests that
    began before still run with it.
    """

    name: str
    path: str
    in_flight: bool = False


@dataclass(frozen=True)
class StartedWith:
    """How a server says it was started; "" where it does not say."""

    model: str = ""
    """The model's path or name."""
    load_format: str = ""
    """How it loaded its weights."""
    backend: str | None = None
    """Its weight-transfer backend, None if it does not say."""
    kv_lease_s: float = 0.0
    """Seconds that a prefill server keeps KV blocks that no decode server fetches, which can delay
    the answer to a pause; 0 for all others."""
    update_problem: str = ""
    """Why an update would leave parts of it wrong (`update_problem`)."""
    drafts: str = ""
    """How it drafts tokens by weights of its own that a push can reach; "" if it does not."""
    draft_model: str = ""
    """The path or name of the model that these weights were loaded from."""
    lora_targets: tuple[str, ...] = ()
    """The modules that it takes LoRA for, () for all that it can."""
    config_problem: Callable[[Mapping[str, Any] | None], str] = lambda config: ""
    """`update_problem` by its model's config.json, None if that cannot be read."""


class Server(Protocol):
    """The control routes of one server. `timeout_s` of a call overrides the server's own.

    Every method raises ServerError (with `refusal` if it is a `Refusal`), ServerUnreachable or
    DeadlineExceeded. Methods of a feature that the engine lacks (`Engine.supports`) are not called.
    """

    target: ServerTarget
    known_ranks: tuple[int, int] | None
    """What `ranks` returns without asking: it cannot change while a process lives."""

    async def health(self) -> None:
        """Return if the engine has not errored."""

    async def version(self) -> str:
        """The engine's version."""

    async def models(self) -> list[str]:
        """Served model names."""

    async def longest_context(self) -> int | None:
        """Tokens of prompt and answer together, None if it does not say."""

    async def generates_from_tokens(self) -> bool:
        """Whether it accepts and returns token ids, without text."""

    async def ranks(self) -> tuple[int, int]:
        """The number of workers of all data-parallel ranks, and of one of them (TP x PP)."""

    async def started_with(self) -> StartedWith:
        """What it was started with."""

    async def metrics(self) -> ServerMetrics:
        """Its load now."""

    # control

    async def is_paused(self) -> bool:
        """Whether it schedules nothing. Round-trips the engine: the real liveness probe."""

    async def pause(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True, timeout_s: float | None = None
    ) -> None:
        """Stop scheduling. abort ends running requests, wait drains them, keep freezes them."""

    async def resume(self) -> None:
        """Schedule again."""

    async def is_sleeping(self) -> bool:
        """Whether it reports that it sleeps; it may do so when it is only paused."""

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Free memory: level 1 keeps a copy of the weights in host memory, level 2 discards them.

        Also pauses, with `mode` for running requests.
        """

    async def wake(self, tags: Sequence[str] = ()) -> bool:
        """Take memory back: all, or `tags` (weights, kv_cache). Returns whether all is back."""

    async def prepare_reload(self) -> None:
        """On a paused server: make sure that `reset_caches` can succeed after other weights are
        loaded. Raises ServerError if it could not; nothing was touched.
        """

    async def reset_caches(self) -> None:
        """Drop everything computed with other weights. Raises ServerError if some is left."""

    # weights

    async def init_weight_transfer(
        self, init_info: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> None:
        """Stage 1 of a push. Blocks in the server until the rendezvous is complete."""

    async def start_weight_update(self, *, timeout_s: float | None = None) -> None:
        """Stage 2 of a push. Fails if an update is already open."""

    async def update_weights(
        self,
        update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Stage 3 of a push, once per chunk; of several infos, each worker takes its own. An error
        closes the update, weights half loaded.
        """

    async def finish_weight_update(
        self, weight_version: str | None = None, *, timeout_s: float | None = None
    ) -> None:
        """Stage 4 of a push. NO_SESSION: none was open; NO_TRANSFER: it takes none."""

    async def reload_weights(self, path: str, *, timeout_s: float | None = None) -> None:
        """Load a checkpoint from the server's own disk. CANNOT_RELOAD: nothing was touched."""

    async def adapters(self) -> list[ServedAdapter]:
        """The LoRA adapters it holds."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a directory that the server can read, under a new name. The
        directory must stay: it may be read again. NO_ADAPTERS: it takes none.
        """

    async def name_adapter(self, name: str, loaded: str) -> None:
        """From the next request on, `name` is the adapter that was loaded as `loaded`, by this name
        alone. Running requests finish with what they began with. CANNOT_NAME: it never can.
        """

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; running requests end with it. May be repeated."""

    async def weight_version(self) -> str | None:
        """The version label the server carries; None if it has none."""

    async def set_weight_version(self, version: str, earlier: Sequence[str] = ()) -> bool:
        """Label the current weights, which came after the versions `earlier`, oldest first. False
        if the server has no labels.
        """

    async def weight_checksums(self, *, timeout_s: float | None = None) -> dict[str, str] | None:
        """The engine's own checksum per parameter; None if it has none."""

    async def collective_rpc(
        self, method: str, kwargs: Arguments | None = None, *, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of skyctl's worker extension. NO_METHOD if workers lack it."""

    async def ask_workers(
        self, method: str, kwargs: Arguments | None = None, *, timeout_s: float | None = None
    ) -> list[Any]:
        """The same on every worker of every data-parallel rank; returns answers in rank order."""

    async def extension_rpc(self, method: str, *, timeout_s: float | None = None) -> None:
        """The same, as a no-op in workers that lack the method."""

    async def nccl_reports(self, *, timeout_s: float | None = None) -> list[Any]:
        """NCCL as its workers have it: mappings of `problem`, "" if it works, and of `settings`,
        its environment variables. Empty if the server does not say.
        """

    async def complete(
        self, body: Mapping[str, Any], *, chat: bool = False, timeout_s: float | None = None
    ) -> Any:
        """One completion, or chat completion, without streaming: OpenAI's JSON."""


# --- the router -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RouterMetrics:
    """Counters since the router started, over all routes.

    `errors` counts requests it answered with an error, `retries` attempts beyond the first.
    """

    requests: int = 0
    errors: int = 0
    retries: int = 0


class Router(Protocol):
    """One router. Each method as a whole is bounded by the deadline that it was made with."""

    @property
    def url(self) -> str: ...

    async def workers(self) -> list[str]:
        """URLs it routes to, without trailing slash, as they are listed (`Routing.entries`)."""

    async def add_worker(self, url: str) -> None:
        """Route to `url`; returns once it is listed. A worker that is already listed is fine."""

    async def remove_worker(self, url: str) -> None:
        """Stop routing to `url`; returns once it is gone. Requests in flight finish."""


@dataclass(frozen=True)
class Routing:
    """An engine's router. Its clients get a deadline in seconds."""

    command: Callable[[RouterLaunch], tuple[str, ...]]
    """The command line that starts it, without workers."""
    workers: Callable[[Mapping[str, Sequence[str]], Sequence[str]], Sequence[str]]
    """What adds workers to that command line, by their role ("" for one that does all): a router
    for pairs takes workers only as it starts."""
    client: Callable[[ControlClient, str, float], Router]
    """Its control routes, at a URL."""
    metrics: Callable[[ControlClient, str, float], Awaitable[RouterMetrics]]
    """Its load, read from its metrics port."""
    removal: Callable[[str, str], str]
    """What to type to take a worker (second) out of the router at a URL (first)."""
    entries: Callable[[str, int], Sequence[str]] = lambda url, count: [url]
    """So many spellings of a worker's URL, which the router takes for as many workers."""
    worker: Callable[[str], str] = str
    """The worker's URL, from any of its spellings."""
    counting_policies: frozenset[str] = frozenset()
    """The policies that give every worker in the list the same number of requests."""


# --- the whole ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variables:
    """The environment variables of an engine's servers."""

    key: str
    """Has a server's API key."""
    closed: str
    """Has the path of the file that keeps a server closed to users while it exists."""
    placement: tuple[str, ...] = ()
    """Depend on where other servers are: a running server need not restart when they change."""


@dataclass(frozen=True)
class ArgumentRules:
    """What a fleet file's `args` may say to an engine's servers."""

    names: Callable[[str, Callable[[str], None]], Collection[str]] = lambda *_: ()
    """Their names, by interpreter; empty if unknown. May take seconds, and says so to the function
    it is given.
    """
    problem: Callable[[str, Any, Collection[str]], str] = lambda name, _, arguments: (
        "" if name in arguments else f"there is no argument {name!r}"
    )
    """Why `--name` is not accepted with this value of the fleet file, "" if it is; by what `names`
    returned.
    """
    warnings: Callable[[Sequence[ServerLaunch], bool], Iterable[tuple[str, str]]] = lambda *_: ()
    """Settings that are probably not meant, and what to write instead; given `share_gpus:`."""
    sleep: str = ""
    """The argument without which a sleeping server frees no GPU memory; "" if it needs none."""


@dataclass(frozen=True)
class HubArguments:
    """The arguments of an engine's servers that name models on the hub."""

    revisions: Mapping[str, str] = field(default_factory=dict)
    """Each with the one that names its revision."""
    follows_model: frozenset[str] = frozenset()
    """Those of them whose revision is the model's unless it is given."""
    shared_revision: frozenset[str] = frozenset()
    """Further ones, whose models can have no revision but the model's."""
    other_hub_variable: str = ""
    """The variable that has servers download from another hub than Hugging Face's; "" if there is
    none."""


@dataclass(frozen=True)
class WeightTransfer:
    """How tensors get into an engine's servers."""

    backend: Callable[[str, Device, Sequence[int], str], str] = lambda *_: ""
    """The weight-transfer backend that servers start with ("" for none), by transport, device, free
    GPUs and `auth:`. Raises UsageError if the transport does not fit the device.
    """
    dialect: Callable[[str], Dialect] | None = None
    """How servers of a version speak the push; None if they only reload from disk."""


@dataclass(frozen=True)
class Engine:
    """One kind of server: everything skyctl must know of it. `ENGINES`
    (`skyctl/engines/__init__.py`) has all.
    """

    name: str
    """Its name in fleet files."""
    title: str
    """Its name in sentences."""
    supports: frozenset[Feature]
    """The features that it has."""
    server: Callable[[ControlClient, ServerTarget, float], Server]
    """Its control routes, given each call's deadline in seconds."""
    server_command: Callable[[ServerLaunch], Command]
    """The command that starts a server."""
    modules: Callable[[Device, bool, str, bool], Mapping[str, str]]
    """Python modules that its interpreter must have, and how to get each: given the device, whether
    there is a router, the backend, and whether servers hand over their KV cache.
    """
    variables: Variables
    """Its environment variables."""
    reserved: Reserved = NOTHING_RESERVED
    """Names that a fleet file must not set."""
    arguments: ArgumentRules = ArgumentRules()
    """What a fleet file may set."""
    hub: HubArguments = HubArguments()
    """The models that its servers look up on the hub."""
    transfer: WeightTransfer = WeightTransfer()
    """How it takes tensors; by default it takes none."""
    sizes: Callable[[Sequence[str], Mapping[str, str]], Sizes] = lambda *_: Sizes(0, 1.0)
    """What a server of this command and environment takes of its machine."""
    routing: Routing | None = None
    """Its router; None if it has none that skyctl knows."""
    traffic: Callable[[ControlClient, ServerTarget, float], Awaitable[ServerTraffic]] | None = None
    """What a server has answered since its start; None if that is not read."""
