"""The fleet file's schema: what a user may write in fleet.yaml, and every default."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from skyctl.engines import DEFAULT as DEFAULT_ENGINE
from skyctl.engines import ENGINES
from skyctl.fleetfile.attached import check_attached
from skyctl.fleetfile.events import EventSection
from skyctl.fleetfile.scaling import ScaleSection
from skyctl.fleetfile.sections import (
    DiscoverySection,
    HealthPolicy,
    HistorySection,
    LogsSection,
    LoraSection,
    RaySection,
    ReplicaGroup,
    RestartPolicy,
    RouterSection,
    Section,
    ServerRole,
    SshSection,
    SupervisorSection,
    TrainerSection,
    WeightTransferSection,
)
from skyctl.fleetfile.sleeping import check_sleep_group
from skyctl.fleetfile.spanning import check_spanning
from skyctl.fleetfile.training import TinkerSection
from skyctl.fleetfile.values import (
    ArgValue,
    Count,
    EnvValue,
    Name,
    Port,
    Replicas,
    Seconds,
    Size,
    Url,
    VariableName,
    available_in,
    is_loopback,
    whole_number,
)
from skyctl.launch import DEFAULT as DEFAULT_LAUNCHER
from skyctl.launch import HOSTS
from skyctl.store.server_names import normalized


class FleetConfig(Section):
    """One fleet: either started by skyctl (`model` + `replicas`) or attached to (`servers`)."""

    name: Name = Field(description="Fleet name: lower-case letters, digits and dashes.")
    engine: Annotated[str, available_in(ENGINES)] = Field(
        DEFAULT_ENGINE, description="Which inference engine the servers run."
    )
    launcher: Annotated[str, available_in(HOSTS)] = Field(
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
    scale: ScaleSection | None = Field(
        None, description="Let load decide how many; `replicas` start."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda when there is a GPU, else cpu."
    )
    gpus: list[Count] | None = Field(
        None, description="GPU indices the fleet may use; all when absent."
    )
    kv_lease_s: Annotated[int, Field(ge=6, le=3600), BeforeValidator(whole_number)] = Field(
        6,
        description="Seconds for which a prefill server keeps a KV cache that no decode server has "
        "asked for. Those that wait for room renew it.",
    )
    share_gpus: bool = Field(
        False, description="Allow several replicas on one GPU (set gpu-memory-utilization)."
    )
    sleep_group: Name | None = Field(
        None, description="Fleets of a group share their GPUs: one is awake (`skyctl switch`)."
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
    trainer: TrainerSection | None = Field(
        None, description="Serve vLLM's RL API for the whole fleet at one URL."
    )
    supervisor: SupervisorSection = Field(default_factory=SupervisorSection)
    on_event: EventSection = Field(
        default_factory=EventSection,
        description="Shell commands that the supervisor runs on events.",
    )
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
        """The groups of replicas; a number of replicas is one group without settings of its own,
        with `scale` of as many as there may be.
        """
        if isinstance(self.replicas, int):
            most = self.scale.max if self.scale else 1
            return [ReplicaGroup(count=max(self.replicas, most))]
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
                check_spanning(
                    nodes,
                    launcher=self.launcher,
                    hosts=len(hosts),
                    stages=group.pipeline_parallel_size or self.pipeline_parallel_size,
                    copies=group.data_parallel_size or self.data_parallel_size,
                    share_gpus=self.share_gpus,
                    transfer=self.weight_transfer,
                )
        self._check_pairs()
        if self.attached and self.lora is not None and self.lora.adapters:
            raise ValueError(
                "`lora.adapters` is for servers that skyctl starts; with `servers`, type: "
                "skyctl adapters load NAME DIR"
            )
        if self.tinker is not None:
            self._check_tinker(self.tinker)
        if self.trainer is not None and self.engine != DEFAULT_ENGINE:
            raise ValueError("`trainer` is for vLLM servers: it speaks their API")
        self._check_tokens()
        if self.scale is not None:
            self._check_scale(self.scale)
        if self.sleep_group is not None:
            others = {"servers": self.servers, "scale": self.scale, "tinker": self.tinker}
            check_sleep_group(self.engine, self.launcher, others)
        return self

    def _check_scale(self, scale: ScaleSection) -> None:
        if self.launcher == "ray":
            raise ValueError("`scale` does not go with `launcher: ray`")
        if not isinstance(self.replicas, int):
            raise ValueError("`scale` goes with a number of `replicas`, not with groups")
        if isinstance(self.router, RouterSection) and not self.router.enabled:
            raise ValueError("`scale` needs the router: without it clients choose their server")
        if "replicas" in self.model_fields_set and (reason := scale.refusal(self.replicas)):
            raise ValueError(f"`replicas: {self.replicas}`, and {reason}")

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
            check_attached(self.model_fields_set)
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
                "for none: write `auth: control` (inference needs no key)"
            )
        if isinstance(self.router, RouterSection) and not self.router.enabled:
            raise ValueError("prefill and decode servers need the router: leave `enabled` out")
        if any((group.data_parallel_size or self.data_parallel_size) > 1 for group in self.groups):
            raise ValueError("`data_parallel_size` does not go with a `role`: write more replicas")
        if self.lora is not None or self.launcher != DEFAULT_LAUNCHER:
            key = "lora" if self.lora is not None else "launcher"
            raise ValueError(f"`{key}` does not go with prefill and decode servers yet")

    def _check_tinker(self, tinker: TinkerSection) -> None:
        tinker.check_place(self.launcher, self.ssh.hosts)
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
        if self.trainer is not None:
            open_hosts["trainer.host"] = self.trainer.host
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
            return not (self.share_gpus or self.sleep_group or self.weight_transfer.backend)
        return warm


def json_schema() -> dict[str, Any]:
    """JSON Schema of a fleet file, as a person may write it."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **FleetConfig.model_json_schema(mode="validation"),
        "patternProperties": {"^x-": {"description": "For the file's own use; ignored."}},
        "title": "skyctl fleet file",
    }
