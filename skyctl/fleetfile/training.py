"""The section of a fleet file that trains, with every default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from skyctl.fleetfile.sections import Section
from skyctl.fleetfile.values import ByteSize, Count, Port, Seconds, Size, whole_number

Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]


class TinkerSection(Section):
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
    machine: str | None = Field(
        None,
        description="With `launcher: ssh`, one of its hosts: the trainer computes there, and reads "
        "and writes `storage` at the same path. Default: this machine.",
    )
    device: Device = Field(
        "cpu",
        description="Where the trainer computes: cpu, cuda or cuda:N. No server gets that GPU, "
        "unless `gpus` lists it.",
    )
    devices: Annotated[list[Device], Field(min_length=1)] | None = Field(
        None,
        description="Instead of `device`, several: a rank on each computes its share of a "
        "request's rows. They shard models of which all parameters are trained.",
    )
    shard_base: bool | None = Field(
        None,
        description="Several `devices` shard the base as well, instead of each having all of it. "
        "Default: where it takes more than 70 % of a GPU's memory.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Of the frozen base model; adapters train in float32."
    )
    threads: Count = Field(
        0, description="CPU threads of each rank of the trainer; 0: torch's default."
    )
    max_rank: Annotated[int, Field(ge=1, le=128), BeforeValidator(whole_number)] = Field(
        32, description="Largest rank of an adapter; the servers' `lora: max_rank` must allow it."
    )
    full_parameters: bool = Field(
        False,
        description="Rank 0 trains all of a model's parameters. Whoever samples from such a model "
        "has its weights pushed to every server.",
    )
    batch_tokens: Size = Field(
        4096,
        description="Tokens of one forward pass of the trainer, padding included; a longer row has "
        "a pass of its own.",
    )
    join_requests: bool | None = Field(
        None,
        description="Compute requests of a model that wait together at once: faster, but two runs "
        "whose requests arrive differently differ in rounding. Default: on a GPU only.",
    )
    open_models: Size = Field(16, description="Models on the trainer's device at a time.")
    parked_memory: ByteSize = Field(
        16 * 1024**3,
        description="Host memory for adapters that are not on the device; others are rebuilt.",
    )
    keep_runs_s: Seconds = Field(
        7 * 86400.0,
        description="A run whose client is gone is kept this long; its checkpoints stay.",
    )
    keep_samplers: Size = Field(
        32, description="Adapters of a model that were saved for a sampling client, without a name."
    )
    keep_samplers_s: Seconds = Field(7200.0, description="Seconds that one is kept after its use.")
    gradient_checkpointing: bool | None = Field(
        None,
        description="Compute activations again for the gradient instead of keeping them: less "
        "memory, a third more time. Default: on a GPU only.",
    )
    max_body: ByteSize = Field(
        64 * 1024 * 1024, description="Largest body of a request; four times that once unpacked."
    )

    @model_validator(mode="after")
    def _one_rank_on_a_gpu(self) -> TinkerSection:
        if self.devices is None:
            return self
        if "device" in self.model_fields_set:
            raise ValueError("write either `device` or `devices`")
        if len(self.devices) > 1 and set(self.devices) != {"cpu"}:
            numbered = [name for name in self.devices if name.startswith("cuda:")]
            if len(set(numbered)) < len(self.devices):
                raise ValueError(
                    "`devices` are different GPUs, each with its number, as in [cuda:6, cuda:7]; "
                    "or each is cpu"
                )
        return self

    def check_place(self, launcher: str, hosts: Sequence[str]) -> None:
        """Raise ValueError if the launcher, with these hosts, cannot start its trainer."""
        if launcher == "ray":
            raise ValueError(
                "`tinker` does not go with `launcher: ray`: write `launcher: ssh`, with the nodes "
                "as its `hosts`"
            )
        if self.machine is None:
            return
        if launcher != "ssh" or self.machine not in hosts:
            raise ValueError("`tinker: machine` is one of `ssh: hosts`, with `launcher: ssh`")
        if self.storage is None:
            raise ValueError(
                "`tinker: machine` needs a `storage` at a path that it shares with this machine"
            )

    @property
    def ranks(self) -> tuple[str, ...]:
        """The device of each rank."""
        return tuple(self.devices or [self.device])

    @property
    def joins(self) -> bool:
        """`join_requests`, or its default for the devices."""
        return bool(self.gpus) if self.join_requests is None else self.join_requests

    @property
    def recomputes(self) -> bool:
        """`gradient_checkpointing`, or its default for the devices."""
        chosen = self.gradient_checkpointing
        return bool(self.gpus) if chosen is None else chosen

    @property
    def gpus(self) -> tuple[int, ...]:
        """Which of the visible GPUs the trainer has; none on CPU."""
        parts = [name.partition(":") for name in self.ranks]
        return tuple(int(number or 0) for kind, _, number in parts if kind == "cuda")
