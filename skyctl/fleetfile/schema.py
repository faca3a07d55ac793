"""The fleet file's schema: what a user may write in fleet.yaml, and every default."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from skyctl.engines import DEFAULT as DEFAULT_ENGINE
from skyctl.engines import ENGINES
from skyctl.errors import UsageError
from skyctl.launch import DEFAULT as DEFAULT_LAUNCHER
from skyctl.launch import HOSTS
from skyctl.plugins import Plugins
from skyctl.store.paths import expanded
from skyctl.store.server_names import normalized
from skyctl.units import parse_bytes


def _whole(value: Any) -> Any:
    """Refuse booleans: YAML reads `yes` and `on` as true, and Python counts true as 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "Input should be a whole number")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "Input should be a number")
    return value


def _chosen(plugins: Plugins[Any]) -> AfterValidator:
    def check_available(name: str) -> str:
        try:
            plugins[name]
        except UsageError as error:
            message = f"{error.message}; {error.hint}" if error.hint else error.message
            raise ValueError(message) from error
        return name

    return AfterValidator(check_available)


def _url(text: str) -> str:
    """`text`, if it can be taken apart: the pattern lets through ports and hosts that cannot."""
    try:
        parts = urlsplit(text)
        port = parts.port  # parsed only when asked for
    except ValueError as error:
        raise ValueError(f"{text!r} is not a URL: {error}") from error
    if not parts.hostname or port == 0:
        raise ValueError(f"{text!r} is not the URL of a server: a host or a port is missing")
    refuse_password(text)
    refuse_route(text)
    return text


def refuse_route(url: str) -> None:
    """Raise ValueError for the URL of a route, as clients of the OpenAI API are given it."""
    path = urlsplit(url).path
    if path.split("/")[1:2] == ["v1"]:
        base = url.removesuffix(path)
        raise ValueError(f"control calls go to the server itself, not to /v1: write {base}")


def refuse_password(url: str) -> None:
    """Raise ValueError for a URL with a password: skyctl sends none, and shows URLs everywhere."""
    if "@" in urlsplit(url).netloc:
        raise ValueError("a URL takes no user or password: name a key with `api_key_env`")


# The constraint stands before the validator: the other way round the JSON Schema loses it.
Port = Annotated[int, Field(ge=1, le=65535), BeforeValidator(_whole)]
Count = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Size = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
MOST_REPLICAS = 512
Replicas = Annotated[int, Field(ge=1, le=MOST_REPLICAS), BeforeValidator(_whole)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_number)]
ByteSize = Annotated[
    int,
    Field(gt=0),
    BeforeValidator(parse_bytes),
    WithJsonSchema({"type": ["integer", "string"], "examples": ["256MiB", 268435456]}),
]
LEAST_STAGE_RATE = 10_000_000
"""Bytes per second: with less, a sender's deadlines would have to be hours."""
StageRate = Annotated[
    int,
    Field(ge=LEAST_STAGE_RATE),
    BeforeValidator(parse_bytes),
    WithJsonSchema({"type": ["integer", "string"], "examples": ["2GB"]}),
]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
BackendName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$"), AfterValidator(_url)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
ArgValue = str | int | float | bool | None | list[str | int | float] | dict[str, Any]
# In the file an environment value may be any scalar: the loader keeps its text as written.
EnvValue = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]

Transport = Literal["auto", "nccl", "ipc", "gloo", "shm", "disk"]
RouterPolicy = Literal[
    "random",
    "round_robin",
    "cache_aware",
    "kv_aware",
    "power_of_two",
    "consistent_hash",
    "sticky_least_loaded",
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HealthPolicy(_Section):
    """How the supervisor watches servers: `/is_paused` (it round-trips the engine core)."""

    interval_s: Seconds = Field(5.0, description="Seconds between probes of one server.")
    timeout_s: Seconds = Field(10.0, description="Deadline of one probe, in seconds.")
    failures: Size = Field(3, description="Failed probes in a row before it counts as dead.")
    startup_timeout_s: Seconds = Field(
        600.0, description="Seconds a server may take from spawn to ready."
    )


class RestartPolicy(_Section):
    """What the supervisor does when a server or the router dies."""

    policy: Literal["on-failure", "never"] = Field(
        "on-failure", description="Restart a process that died, or leave it dead."
    )
    max_restarts: Count = Field(
        5, description="Restarts within window_s before the replica is given up."
    )
    window_s: Seconds = Field(600.0, description="Seconds over which restarts are counted.")
    backoff_s: Seconds = Field(1.0, description="First wait before a restart; doubles each time.")
    backoff_max_s: Seconds = Field(30.0, description="Longest wait before a restart.")


class SshSection(_Section):
    """Other machines that servers run on (`launcher: ssh`)."""

    hosts: list[Annotated[str, Field(pattern=r"^[^\s-]\S*$")]] = Field(
        default_factory=list, description="Machines as ssh knows them, as in user@gpu-1."
    )
    python: str = Field(
        "python3", description="Interpreter on each of them that has skyctl and the engine."
    )
    command: Annotated[list[str], Field(min_length=1)] = Field(
        default=[
            *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
            *("-o", "ControlPath=none"),  # or one connection that breaks would take all others
            *("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"),
        ],
        description="The ssh client; host and command are added. A word with {host} names the "
        "host instead, for another client that runs a line of shell there, such as srun.",
    )
    orphan_grace_s: Seconds = Field(
        120.0, description="Seconds without a word from its supervisor after which a server ends."
    )


class RaySection(_Section):
    """The Ray cluster that servers run on (`launcher: ray`)."""

    address: str = Field("auto", description="The head's HOST:PORT; auto is this machine's.")
    nodes: dict[str, str] = Field(
        default_factory=dict, description="Labels that a node must have to carry servers."
    )
    head: bool = Field(False, description="Whether the head's node may carry servers.")
    strategy: Literal["spread", "pack"] = Field(
        "spread", description="Prefer nodes with few of skyctl's servers, or with many."
    )
    allow_unauthenticated: bool = Field(
        False,
        description="Take a cluster without a token, where every client can run code.",
    )
    python: str = Field(
        "python3", description="Interpreter on each node that has skyctl and the engine."
    )
    orphan_grace_s: Seconds = Field(
        120.0, description="Seconds without a word from its supervisor after which a server ends."
    )


class LogsSection(_Section):
    """How large the logs of servers, router and supervisor get."""

    max_size: ByteSize = Field(
        32 * 1024 * 1024, description="A log that is larger is copied aside and emptied."
    )
    keep: Count = Field(3, description="Copies of each log that are kept.")


class HistorySection(_Section):
    """How much of what happened the state file keeps."""

    pushes: Size = Field(500, description="Pushes and their jobs that are kept, at least 50.")
    events: Size = Field(10_000, description="Lines of the fleet's history that are kept.")
    days: Seconds = Field(90.0, description="Days after which they are forgotten.")


class SupervisorSection(_Section):
    """How the supervisor is reached from other machines; it always answers on this one."""

    listen: str | None = Field(
        None, description="HOST:PORT for other machines (skyctl status --fleet https://HOST:PORT)."
    )
    tls: bool = Field(True, description="false: plain HTTP, on a loopback address only.")
    tls_cert: str | None = Field(
        None, description="PEM file (relative to this file); a self-signed one is made when absent."
    )
    tls_key: str | None = Field(None, description="PEM file with the certificate's key.")
    token_file: str | None = Field(
        None, description="File (mode 0600) with the token to ask for; one is made when absent."
    )

    @property
    def address(self) -> tuple[str, int]:
        """Host, without brackets, and port of `listen`."""
        host, _, port = (self.listen or "").rpartition(":")
        return host.removeprefix("[").removesuffix("]"), int(port)

    @model_validator(mode="after")
    def _safe(self) -> SupervisorSection:
        if self.listen is None:
            return self
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError("`supervisor.listen` is HOST:PORT, as in 0.0.0.0:7420")
        if not self.tls and not is_loopback(self.address[0]):
            raise ValueError(
                f"`supervisor.tls: false` with listen {self.listen}: a reader of the token on "
                "its way could replace the weights; leave `tls` out, or listen on 127.0.0.1"
            )
        if not self.tls and (self.tls_cert or self.tls_key):
            raise ValueError("`supervisor.tls: false` goes without `tls_cert` and `tls_key`")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("`supervisor.tls_cert` and `tls_key` go together")
        return self


class RouterSection(_Section):
    """The vllm-router in front of the servers."""

    enabled: bool = Field(True, description="Start a router (false: none).")
    host: str = Field("127.0.0.1", description="Address the router binds.")
    port: Port | None = Field(None, description="Router port; free one when absent.")
    metrics_port: Port | None = Field(None, description="Prometheus port; free one when absent.")
    policy: RouterPolicy = Field("cache_aware", description="Load-balancing policy.")
    health_interval_s: Size = Field(
        5, description="Seconds between the router's own health checks (its default is 60)."
    )
    request_timeout_s: Size = Field(
        1800, description="Seconds after which the router gives up on a request."
    )
    args: dict[str, ArgValue] = Field(
        default_factory=dict,
        description="Any other vllm-router argument, e.g. `retry-max-retries: 2`.",
    )
    env: dict[str, EnvValue] = Field(default_factory=dict, description="Environment of the router.")


class WeightTransferSection(_Section):
    """How `sync-weights` carries tensors into the servers."""

    transport: Transport = Field(
        "auto", description="auto picks shm on CPU; ipc or nccl on GPUs by topology."
    )
    backend: BackendName | None = Field(
        None, description="Weight-transfer backend of servers for a trainer that sends by itself."
    )
    chunk_size: ByteSize = Field(
        256 * 1024 * 1024, description="Bytes per chunk; grows to fit the largest tensor."
    )
    rendezvous_timeout_s: Seconds = Field(
        30.0, description="Deadline for sender and servers to form their group."
    )
    update_timeout_s: Seconds = Field(
        120.0,
        description="Deadline for one chunk to be loaded by every server, and for a trainer's "
        "`fleet.update` block that sets none.",
    )
    verify: bool = Field(True, description="Compare the servers' weights after each push.")
    stage_rate: StageRate | None = Field(
        None,
        description="Bytes per second that the sender reads at most while the servers serve, 10MB "
        "or more (default: no bound).",
    )
    readers: Literal["all", "one"] = Field(
        "all",
        description="Where `ipc` has a sender on each of several machines: all read the "
        "checkpoint, or one does and passes it on by NCCL.",
    )
    warm: bool | None = Field(
        None,
        description="Rehearse the first push once all servers are up, and keep a GPU sender ready "
        "(default: unless `share_gpus` or `backend`).",
    )


class LoraSection(_Section):
    """LoRA adapters that the servers serve beside their model."""

    max_adapters: Size = Field(4, description="Adapters served at the same time, at most.")
    max_rank: Annotated[int, Field(ge=1, le=512), BeforeValidator(_whole)] = Field(
        16, description="Largest rank of an adapter; memory is reserved for it."
    )
    adapters: dict[AdapterName, str] = Field(
        default_factory=dict,
        description="Adapters from the start: name and PEFT directory (relative to this file).",
    )

    @model_validator(mode="after")
    def _room_for_all(self) -> LoraSection:
        if len(self.adapters) > self.max_adapters:
            raise ValueError(
                f"{len(self.adapters)} adapters, and max_adapters is {self.max_adapters}"
            )
        return self


ServerRole = Literal["prefill", "decode"]


class ReplicaGroup(_Section):
    """A group of replicas that differ from the fleet's defaults."""

    name: Name | None = Field(
        None, description="Replica names start with it (default: the fleet's, and the `role`)."
    )
    role: ServerRole | None = Field(
        None,
        description="prefill: computes the KV cache of prompts, and hands it over; decode: fetches "
        "it and generates. A fleet has groups of both, or of neither.",
    )
    count: Replicas = Field(1, description="Replicas in this group.")
    args: dict[str, ArgValue] = Field(
        default_factory=dict, description="vLLM arguments, over the fleet's `args`."
    )
    env: dict[str, EnvValue] = Field(
        default_factory=dict, description="Environment, over the fleet's `env`."
    )
    gpus: list[list[Count]] | None = Field(
        None, description="One list of GPU indices per replica; automatic when absent."
    )
    ports: list[Port] | None = Field(None, description="One port per replica.")
    tensor_parallel_size: Size | None = Field(
        None, description="Over the fleet's tensor_parallel_size."
    )
    pipeline_parallel_size: Size | None = Field(
        None, description="Over the fleet's pipeline_parallel_size."
    )
    data_parallel_size: Size | None = Field(
        None, description="Over the fleet's data_parallel_size."
    )
    nodes_per_replica: Size | None = Field(None, description="Over the fleet's nodes_per_replica.")

    @model_validator(mode="after")
    def _lists_match_count(self) -> ReplicaGroup:
        for key in ("gpus", "ports"):
            value = getattr(self, key)
            if value is not None and len(value) != self.count:
                raise ValueError(f"{key} has {len(value)} entries for {self.count} replicas")
        return self


class TinkerSection(_Section):
    """An API for the `tinker` SDK: it trains LoRA adapters here and samples from the fleet."""

    base_model: Annotated[str, Field(pattern=r"^[\w.-]+(/[\w.-]+)?$")] | None = Field(
        None,
        description="The model's name for clients, as ORG/NAME: SDKs find its tokenizer under "
        "it. Default: the served model name.",
    )
    host: str = Field("127.0.0.1", description="Address the API binds.")
    port: Port = Field(8790, description="Port of the API.")
    storage: str | None = Field(
        None, description="Directory of runs and checkpoints; in the fleet's own when absent."
    )
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = Field(
        "cpu",
        description="Where the trainer computes: cpu, cuda or cuda:N. No server gets that GPU, "
        "unless `gpus` lists it.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of the frozen base model; adapters train in float32."
    )
    threads: Count = Field(0, description="Threads of the trainer on CPU; 0: torch's default.")
    max_rank: Annotated[int, Field(ge=1, le=128), BeforeValidator(_whole)] = Field(
        32, description="Largest rank of an adapter; the servers' `lora: max_rank` must allow it."
    )
    full_parameters: bool = Field(
        False,
        description="Rank 0 trains all of a model's parameters. Whoever samples from such a model "
        "has its weights pushed to every server.",
    )
    batch_tokens: Size = Field(
        4096, description="Tokens of one forward pass of the trainer, padding included."
    )
    gradient_checkpointing: bool | None = Field(
        None,
        description="Compute activations again for the gradient instead of keeping them: less "
        "memory, a third more time. Default: on a GPU only.",
    )
    max_body: ByteSize = Field(
        64 * 1024 * 1024, description="Largest body of a request; four times that once unpacked."
    )

    @property
    def recomputes(self) -> bool:
        """`gradient_checkpointing`, or its default for the device."""
        chosen = self.gradient_checkpointing
        return self.device != "cpu" if chosen is None else chosen

    @property
    def gpu(self) -> int | None:
        """Which of the visible GPUs `device` is; None on CPU."""
        kind, _, number = self.device.partition(":")
        return int(number or 0) if kind == "cuda" else None


class DiscoverySection(_Section):
    """Servers that another system places: each command looks them up again. One key of two."""

    dns: str | None = Field(
        None,
        pattern=r"^[^\s:/@]+:[1-9][0-9]{0,4}$",
        description="Every address of a host name, as in `gpus.example:8000`.",
    )
    command: str | None = Field(
        None,
        pattern=r"\S",
        description="A shell command that prints one server per line: `URL`, or `NAME URL`.",
    )

    @model_validator(mode="after")
    def _one_way(self) -> DiscoverySection:
        if (self.dns is None) == (self.command is None):
            raise ValueError("write either `dns` or `command`")
        if self.dns is not None and int(self.dns.rpartition(":")[2]) > 65535:
            raise ValueError(f"`dns: {self.dns}` names no port: they end at 65535")
        return self


class FleetConfig(_Section):
    """One fleet: either started by skyctl (`model` + `replicas`) or attached to (`servers`)."""

    name: Name = Field(description="Fleet name: lower-case letters, digits and dashes.")
    engine: Annotated[str, _chosen(ENGINES)] = Field(
        DEFAULT_ENGINE, description="Which inference engine the servers run."
    )
    launcher: Annotated[str, _chosen(HOSTS)] = Field(
        DEFAULT_LAUNCHER, description="What starts the processes, and where."
    )
    ssh: SshSection = Field(
        default_factory=SshSection, description="Where `launcher: ssh` starts servers."
    )
    ray: RaySection = Field(
        default_factory=RaySection, description="Where `launcher: ray` starts servers."
    )
    shared_dir: str | None = Field(
        None,
        pattern=r"^/.",
        description="A directory that all machines see at this path, for the fleet's own copies: "
        "adapters, versions that are kept, weights from a trainer's memory.",
    )

    model: str | None = Field(
        None,
        description="Checkpoint directory (relative to this file) or a hub model id. Until `down` "
        "it means what it meant at `up`: a commit of the local hub cache, a directory without "
        "links.",
    )
    served_model_name: str | None = Field(
        None, description="Model name in the API; the directory's name or the model id by default."
    )
    replicas: Replicas | Annotated[list[ReplicaGroup], Field(min_length=1)] = Field(
        1, description="How many replicas, or a list of groups that differ."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda when there is a GPU, else cpu."
    )
    gpus: list[Count] | None = Field(
        None, description="GPU indices the fleet may use; all when absent."
    )
    kv_lease_s: Annotated[int, Field(ge=6, le=3600), BeforeValidator(_whole)] = Field(
        6,
        description="Seconds for which a prefill server keeps a KV cache that no decode server has "
        "asked for. Those that wait for room renew it.",
    )
    share_gpus: bool = Field(
        False, description="Allow several replicas on one GPU (set gpu-memory-utilization)."
    )
    tensor_parallel_size: Size = Field(1, description="GPUs that split each layer.")
    pipeline_parallel_size: Size = Field(1, description="Groups of GPUs that split the layers.")
    data_parallel_size: Size = Field(1, description="Copies of the model inside one replica.")
    nodes_per_replica: Size = Field(
        1,
        description="Machines that a replica runs on (`launcher: ssh`), each with as many pipeline "
        "stages. What they say to each other is neither encrypted nor authenticated.",
    )
    host: str = Field("127.0.0.1", description="Address the servers bind.")
    ports: list[Port] | None = Field(
        None, description="One port per replica, in order; free ones when absent."
    )
    args: dict[str, ArgValue] = Field(
        default_factory=dict,
        description="Any vLLM server argument, e.g. `max-model-len: 4096`; true adds a bare flag.",
    )
    check_args: bool = Field(
        True, description="Refuse names in `args` that the installed vLLM does not take."
    )
    env: dict[str, EnvValue] = Field(
        default_factory=dict, description="Environment of every server."
    )
    python: str | None = Field(
        None, description="Python interpreter that has vLLM; skyctl's own by default."
    )

    servers: list[Url] | DiscoverySection | None = Field(
        None,
        description="URLs of servers that skyctl did not start, or how to find them: control only.",
    )

    router: RouterSection | Url = Field(
        default_factory=RouterSection,
        description="Router settings, or with `servers` the URL of a running router.",
    )
    weight_transfer: WeightTransferSection = Field(default_factory=WeightTransferSection)
    lora: LoraSection | None = Field(
        None, description="Serve LoRA adapters; what they may be, and which from the start."
    )
    health: HealthPolicy = Field(default_factory=HealthPolicy)
    restart: RestartPolicy = Field(default_factory=RestartPolicy)
    logs: LogsSection = Field(default_factory=LogsSection)
    history: HistorySection = Field(default_factory=HistorySection)
    tinker: TinkerSection | None = Field(
        None, description="Serve the Tinker API beside the fleet; needs `lora`."
    )
    supervisor: SupervisorSection = Field(default_factory=SupervisorSection)
    control_timeout_s: Seconds = Field(
        30.0, description="Deadline of one control call (pause, resume, wake …) in seconds."
    )
    drain_timeout_s: Seconds = Field(
        30.0, description="Seconds `down`, `restart` and `scale` wait for running requests."
    )
    stop_timeout_s: Seconds = Field(
        15.0, description="Seconds between TERM and KILL when a process is stopped."
    )
    auth: Literal["all", "control", "none"] = Field(
        "all",
        description="Which routes ask for a token: every one but health, all but inference, "
        "or none.",
    )
    api_key_env: VariableName | None = Field(
        None,
        description="Name of the environment variable that holds the servers' API key; one is "
        "made when absent.",
    )
    control_token_env: VariableName | None = Field(
        None,
        description="With `servers`: name of the environment variable that holds the control "
        "token of servers that another skyctl started.",
    )

    @property
    def attached(self) -> bool:
        """True for a fleet that skyctl did not start."""
        return self.servers is not None

    @property
    def groups(self) -> list[ReplicaGroup]:
        """The groups of replicas; a number of replicas is one group without settings of its own."""
        if isinstance(self.replicas, int):
            return [ReplicaGroup(count=self.replicas)]
        return self.replicas

    @property
    def pairs(self) -> bool:
        """Whether prompts and answers are computed by different servers."""
        return any(group.role for group in self.groups)

    @model_validator(mode="after")
    def _is_consistent(self) -> FleetConfig:
        self._check_servers()
        hosts = self.ssh.hosts
        if self.launcher == "ssh" and (not hosts or len(set(hosts)) < len(hosts)):
            raise ValueError("`launcher: ssh` needs `ssh: {hosts: [...]}`, each machine once")
        if self.launcher == "ray":
            self._check_ray()
        self._check_launcher()
        for group in self.groups:
            if (nodes := group.nodes_per_replica or self.nodes_per_replica) > 1:
                self._check_spanning(nodes, group)
        self._check_pairs()
        if self.attached and self.lora is not None and self.lora.adapters:
            raise ValueError(
                "`lora.adapters` is for servers that skyctl starts; with `servers`, type: "
                "skyctl adapters load NAME DIR"
            )
        if self.tinker is not None:
            self._check_tinker(self.tinker)
        self._check_tokens()
        return self

    def _check_servers(self) -> None:
        if self.servers is not None:
            if self.model is not None:
                raise ValueError("write either `model` (skyctl starts servers) or `servers`")
            if not self.servers:
                raise ValueError("`servers` is empty")
            listed = self.servers if isinstance(self.servers, list) else []
            if len({normalized(url) for url in listed}) < len(listed):
                raise ValueError("`servers` lists a URL twice")
            if "router" in self.model_fields_set and not isinstance(self.router, str):
                raise ValueError("with `servers`, `router` is the URL of a running router")
        else:
            if self.model is None:
                raise ValueError("`model` is missing (or `servers`, for servers already running)")
            if isinstance(self.router, str):
                raise ValueError("`router` as a URL goes with `servers`")

    def _check_ray(self) -> None:
        if self.ports or self.gpus or self.share_gpus or any(group.ports for group in self.groups):
            raise ValueError(
                "`ports`, `gpus` and `share_gpus` do not go with `launcher: ray`: Ray chooses node "
                "and GPUs, skyctl a free port there"
            )
        if self.pairs:
            raise ValueError("groups with a `role` do not go with `launcher: ray`")
        if self.ray.address.startswith("ray://"):
            raise ValueError("`ray: {address: ray://...}` is of Ray Client; write HOST:6379")

    def _check_launcher(self) -> None:
        for launcher in ("ssh", "ray"):
            if launcher in self.model_fields_set and self.launcher != launcher:
                raise ValueError(f"`{launcher}` goes with `launcher: {launcher}`")
        if self.launcher not in ("ssh", "ray"):
            if self.shared_dir is not None:
                raise ValueError("`shared_dir` goes with `launcher: ssh` or `launcher: ray`")
            return
        if "host" in self.model_fields_set:
            raise ValueError("`host` goes with one machine; a server binds its machine's address")
        if any(group.gpus for group in self.groups):
            raise ValueError("a group's `gpus` goes with one machine; leave it out")
        if self.tinker is not None:
            raise ValueError("`tinker` goes with one machine: it trains for servers beside it")
        if self.lora is not None and self.shared_dir is None:
            raise ValueError(
                "`lora` needs a directory that all machines share: servers read the fleet's copies "
                "of adapters there; write `shared_dir: /PATH`"
            )
        if self.auth == "none":
            raise ValueError(
                f"`auth: none` with `launcher: {self.launcher}`: every client that reaches "
                "the machines could replace the weights; leave `auth` out"
            )

    def _check_spanning(self, nodes: int, group: ReplicaGroup) -> None:
        """Raise ValueError if a replica cannot run on several machines as the file has it."""
        setting, hosts = f"`nodes_per_replica: {nodes}`", len(self.ssh.hosts)
        stages = group.pipeline_parallel_size or self.pipeline_parallel_size
        if self.launcher != "ssh":
            raise ValueError(
                f"{setting} goes with `launcher: ssh`: elsewhere a replica runs on one machine"
            )
        if stages % nodes:
            raise ValueError(
                f"{setting} with `pipeline_parallel_size: {stages}`: each machine takes whole "
                f"pipeline stages; write a multiple of {nodes}"
            )
        if hosts < nodes:
            raise ValueError(f"{setting}, and `ssh: hosts` names {hosts}: add machines")
        if (group.data_parallel_size or self.data_parallel_size) > 1:
            raise ValueError(
                f"{setting} does not go with `data_parallel_size`: write more replicas"
            )
        if self.share_gpus:
            raise ValueError(f"{setting} does not go with `share_gpus`: leave one of the two out")
        transport, backend = self.weight_transfer.transport, self.weight_transfer.backend
        if backend or transport not in ("auto", "disk"):
            sender = f"backend {backend}" if backend else f"transport {transport}"
            raise ValueError(
                f"{setting} with {sender}: a sender reaches the workers of one machine; leave it "
                "out: each machine reads the checkpoint (disk)"
            )

    def _check_pairs(self) -> None:
        if not self.pairs:
            if "kv_lease_s" in self.model_fields_set:
                raise ValueError("`kv_lease_s` goes with groups that have a `role`")
            return
        roles = {group.role for group in self.groups}
        if roles != set(get_args(ServerRole)):
            lacking = "`role: decode`" if roles == {"prefill"} else "`role: prefill`"
            lacking = "a `role` in every group" if None in roles else f"a group with {lacking}"
            raise ValueError(f"prefill and decode servers work in pairs: there must be {lacking}")
        if self.auth == "all":
            raise ValueError(
                "with prefill and decode servers vllm-router sends no client's key on, and asks "
                "for none: write `auth: control` (inference asks for nothing)"
            )
        if isinstance(self.router, RouterSection) and not self.router.enabled:
            raise ValueError("prefill and decode servers need the router: leave `enabled` out")
        if any((group.data_parallel_size or self.data_parallel_size) > 1 for group in self.groups):
            raise ValueError("`data_parallel_size` does not go with a `role`: write more replicas")
        if self.lora is not None or self.launcher != DEFAULT_LAUNCHER:
            key = "lora" if self.lora is not None else "launcher"
            raise ValueError(f"`{key}` does not go with prefill and decode servers yet")

    def _check_tinker(self, tinker: TinkerSection) -> None:
        if self.attached:
            raise ValueError("`tinker` is for servers that skyctl starts: it trains their `model`")
        if self.lora is None or self.lora.max_rank < tinker.max_rank:
            rank = "without `lora` they take none"
            if self.lora is not None:
                rank = f"their `lora: max_rank` is {self.lora.max_rank}"
            raise ValueError(
                f"`tinker` trains adapters of rank {tinker.max_rank} for the servers; {rank}: "
                f"write `lora: {{max_rank: {tinker.max_rank}}}`, or a smaller `tinker: max_rank`"
            )

    def _check_tokens(self) -> None:
        if self.attached:
            if self.supervisor.listen is not None:
                raise ValueError("`supervisor` is for servers that skyctl starts")
            if "auth" in self.model_fields_set:
                raise ValueError(
                    "`auth` is for servers that skyctl starts; with `servers`, name "
                    "what they want: `control_token_env` or `api_key_env`"
                )
            return
        if self.control_token_env is not None:
            raise ValueError(
                "`control_token_env` goes with `servers`; skyctl makes the token of "
                "servers it starts"
            )
        if self.auth != "none":
            return
        # what would let others than this machine's users take the servers over, or their user
        open_hosts = {"host": self.host}
        if isinstance(self.router, RouterSection) and self.router.enabled:
            open_hosts["router.host"] = self.router.host
        for key, host in open_hosts.items():
            if not is_loopback(host):
                raise ValueError(
                    f"`auth: none` with {key} {host}: every client that reaches these "
                    f"ports could replace the weights; leave `auth` out, or `{key}`"
                )
        if self.weight_transfer.transport == "ipc":
            raise ValueError(
                "`auth: none` with transport ipc: servers unpickle what is sent to them; leave "
                "`auth` out, or take nccl or disk"
            )

    @property
    def warms(self) -> bool:
        """Whether a push is rehearsed before the first one: it takes memory that must be free."""
        warm = self.weight_transfer.warm
        if warm is None:  # the GPU that is free is that of a trainer which sends by itself
            return not (self.share_gpus or self.weight_transfer.backend)
        return warm


def is_loopback(host: str) -> bool:
    """True when only this machine can reach what listens at `host`. A name counts by its text."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def resolve_relative(path: str, base: Path) -> str:
    """`path` made absolute against `base` when it exists there or is written like a path.

    A hub model id such as `Qwen/Qwen3-0.6B` stays as it is.
    """
    candidate = expanded(path)
    if candidate.is_absolute():
        return str(candidate)
    if path.startswith((".", "~")) or (base / candidate).exists():
        return str((base / candidate).resolve())
    return path


def json_schema() -> dict[str, Any]:
    """JSON Schema of a fleet file, as a person may write it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **FleetConfig.model_json_schema(mode="validation"),
        "patternProperties": {"^x-": {"description": "For the file's own use; ignored."}},
        "title": "skyctl fleet file",
    }
