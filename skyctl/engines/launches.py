"""What the plan decides for the processes of an engine, and the commands that start them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from skyctl.units import finite_or

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class AdapterLimits:
    """How many LoRA adapters a server takes at the same time, and their largest rank."""

    count: int
    rank: int


@dataclass(frozen=True)
class HandOver:
    """How a prefill server hands its KV cache to a decode server.

    `role` is prefill or decode; `port` is where the others ask it for what they need to fetch a
    cache, which is kept for `lease_s` seconds if no server asks.
    """

    role: str
    port: int
    lease_s: int


@dataclass(frozen=True)
class Span:
    """The place of a server's part among the machines that it runs on."""

    nodes: int
    """The number of parts, one per machine."""
    rank: int
    """This part's number; rank 0 leads and answers."""
    address: str
    """Where all parts meet: the leader's address."""
    port: int
    """The port at which they meet."""
    own_address: str
    """The address of this part's machine."""
    interface: str = ""
    """The network interface that has `own_address`, "" if unknown."""


@dataclass(frozen=True)
class ServedModel:
    """The model that a server loads."""

    path: str
    """Its directory, or its name on the hub."""
    name: str
    """Its name in requests."""
    local: bool = True
    """Whether `path` is a directory."""
    config: Mapping[str, Any] | None = None
    """Its config.json, for servers that take adapters; None if it is not on this machine."""


@dataclass(frozen=True)
class ServerPlacement:
    """The hardware that a server runs on."""

    device: Device
    """What it computes on."""
    gpus: tuple[int, ...] = ()
    """Its GPUs, by number; with a `span`, those of this part."""
    cores: tuple[tuple[int, ...], ...] = ()
    """CPU cores of each worker in rank order, () if the engine chooses; with a `span`, of this
    part."""
    span: Span | None = None
    """Its part of a server on several machines; None on one machine."""


@dataclass(frozen=True)
class Parallelism:
    """How a server divides its model among workers."""

    tensor: int = 1
    """Workers that share each layer."""
    pipeline: int = 1
    """Stages that the layers are divided into."""
    data: int = 1
    """Copies of the model in this server."""

    @property
    def world_size(self) -> int:
        """The number of workers, each with its own GPU or its own CPU cores."""
        return self.tensor * self.pipeline * self.data


@dataclass(frozen=True)
class Access:
    """Which of a server's routes require a token, and which token."""

    secret: str
    """The key that skyctl makes for it: a placeholder until it is spawned."""
    auth: Literal["all", "control", "none"] = "all"
    """Which routes require a token."""
    api_key: str | None = None
    """The user's key; None for one that skyctl makes."""


@dataclass(frozen=True)
class ServerLaunch:
    """What the plan has decided for one server. `host` and `port` may be placeholders."""

    python: str
    """The interpreter that runs it."""
    model: ServedModel
    """What it serves."""
    host: str
    """The address that it binds."""
    port: int | str
    """The port that it listens at."""
    placement: ServerPlacement
    """Where it computes."""
    backend: str
    """The weight-transfer backend that it starts with, "" for none."""
    args: Mapping[str, Any]
    """The fleet file's arguments, by their names without dashes."""
    env: Mapping[str, str]
    """The fleet file's environment variables."""
    environ: Mapping[str, str]
    """The environment that the process will inherit."""
    access: Access
    """Who may use it."""
    parallelism: Parallelism = Parallelism()
    """Its workers."""
    own_python: bool = True
    """Whether it runs in skyctl's interpreter, which has skyctl."""
    adapters: AdapterLimits | None = None
    """Limits of its LoRA adapters; None if it takes none."""
    hand_over: HandOver | None = None
    """How it hands over its KV cache; None if it both prefills and decodes."""


@dataclass(frozen=True)
class RouterLaunch:
    """What the plan has decided for the router."""

    python: str
    """The interpreter that runs it."""
    host: str
    """The address that it binds."""
    port: int
    """The port that clients use."""
    metrics_port: int
    """The port of its metrics."""
    policy: str
    """How it chooses a server."""
    health_interval_s: int
    """Seconds between its health checks of a server."""
    request_timeout_s: int
    """Seconds after which it gives a request up."""
    args: Mapping[str, Any]
    """The fleet file's arguments, by their names without dashes."""
    pairs: bool = False
    """Whether it sends each request to a prefill and a decode server."""


@dataclass(frozen=True)
class Command:
    """A process to start: `env` is added to what it inherits, and may hold secrets."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class Reserved:
    """Names that a fleet file must not set, and what to write instead."""

    server_args: Mapping[str, str]
    router_args: Mapping[str, str]
    env: Mapping[str, str]


NOTHING_RESERVED = Reserved({}, {}, {})

RESERVED_ARGS = {
    "host": "use the key `host`",
    "port": "use the key `ports`",
    "model": "use the key `model`",
    "served-model-name": "use the key `served_model_name`",
    "tensor-parallel-size": "use the key `tensor_parallel_size`",
    "pipeline-parallel-size": "use the key `pipeline_parallel_size`",
    "api-key": "use the key `api_key_env`; keys never go on a command line",
    "config": "write its settings under `args`",
    "ssl-keyfile": "skyctl talks plain HTTP to its servers; end TLS in front of the router",
    "ssl-certfile": "skyctl talks plain HTTP to its servers; end TLS in front of the router",
}
"""Of the `server_args` of vLLM and SGLang, those that both have."""


@dataclass(frozen=True)
class Sizes:
    """What a server takes of its machine: bytes of host memory beside the weights (on CPU), the
    share of each GPU's memory (0..1), and how many times it loads the model.
    """

    host_bytes: int
    gpu_share: float
    copies: int = 1


def number_after(argument: str, argv: Sequence[str], default: float) -> float:
    """The number that a command line gives for an argument; `default` if it gives none."""
    return finite_or(argv[argv.index(argument) + 1], default) if argument in argv[:-1] else default


def update_problem(*, moves_experts: bool, drafts: str = "") -> str:
    """Why an update would leave parts of a server wrong, by its settings; "" if it would not.
    `drafts` is how it drafts tokens by weights that no push reaches, "" if it does not.
    """
    if moves_experts:
        return (
            "it moves experts between ranks (enable-eplb), and a push would load them where they "
            "were at its start"
        )
    if drafts:
        return draft_problem(drafts)
    return ""


def draft_problem(drafts: str) -> str:
    """Why a push of the model alone would not update all weights of a server that `drafts`."""
    return (
        f"it drafts tokens with other weights (speculative decoding by {drafts}), which a push "
        "would leave as they are"
    )


def push_warnings(problems: Iterable[str]) -> Iterator[tuple[str, str]]:
    """A warning of the first of the launches' update problems, and what to change."""
    if problem := next(filter(None, problems), ""):
        yield (
            f"pushes into these servers will be refused: {problem}",
            "take it out of `args`, or restart the servers on each checkpoint",
        )
