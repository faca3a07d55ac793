"""Sections of a fleet file, with every default."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)

from skyctl.fleetfile.values import (
    AdapterName,
    ArgValue,
    BackendName,
    ByteSize,
    Count,
    EnvValue,
    Name,
    Port,
    Replicas,
    RouterPolicy,
    Seconds,
    Size,
    StageRate,
    Transport,
    is_loopback,
    whole_number,
)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HealthPolicy(Section):
    """How the supervisor watches servers: `/is_paused` (it round-trips the engine core)."""

    interval_s: Seconds = Field(5.0, description="Seconds between probes of one server.")
    timeout_s: Seconds = Field(10.0, description="Deadline of one probe, in seconds.")
    failures: Size = Field(3, description="Failed probes in a row before it counts as dead.")
    startup_timeout_s: Seconds = Field(
        600.0, description="Seconds a server may take from spawn to ready."
    )


class RestartPolicy(Section):
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


class SshSection(Section):
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


class RaySection(Section):
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


class LogsSection(Section):
    """How large the logs of servers, router and supervisor get."""

    max_size: ByteSize = Field(
        32 * 1024 * 1024, description="A log that is larger is copied aside and emptied."
    )
    keep: Count = Field(3, description="Copies of each log that are kept.")


class HistorySection(Section):
    """How much of what happened the state file keeps."""

    pushes: Size = Field(500, description="Pushes and their jobs that are kept, at least 50.")
    events: Size = Field(10_000, description="Lines of the fleet's history that are kept.")
    days: Seconds = Field(90.0, description="Days after which they are forgotten.")


class SupervisorSection(Section):
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


class RouterSection(Section):
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


class WeightTransferSection(Section):
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
    verify: bool = Field(
        True,
        description="Compare the servers' weights after each push that does not say otherwise "
        "(`--verify`, `--no-verify`).",
    )
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
        "(default: unless `share_gpus`, `sleep_group` or `backend`).",
    )


class LoraSection(Section):
    """LoRA adapters that the servers serve beside their model."""

    max_adapters: Size = Field(4, description="Adapters served at the same time, at most.")
    max_rank: Annotated[int, Field(ge=1, le=512), BeforeValidator(whole_number)] = Field(
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


class ReplicaGroup(Section):
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


class TrainerSection(Section):
    """One URL that speaks vLLM's RL API for the whole fleet, for trainers with clients of their
    own."""

    host: str = Field("127.0.0.1", description="Address the fleet URL binds.")
    port: Port = Field(8791, description="Port of the fleet URL.")


class DiscoverySection(Section):
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
