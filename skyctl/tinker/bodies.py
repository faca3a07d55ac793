"""Bodies of the SDK's JSON requests. Unknown fields are ignored, as the SDK does with ours."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Name of a checkpoint: part of its tinker:// path. It never becomes part of a path on disk."""
Seq = Annotated[int, Field(ge=1, le=2**62)]
From0 = Annotated[int, Field(ge=0, le=2**62)]
Ttl = Annotated[int, Field(ge=1, le=10 * 366 * 86400)]
Metadata = dict[str, Any] | None


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateSession(_Body):
    tags: list[str] = []
    user_metadata: Metadata = None
    project_id: str | None = None
    display_name: str | None = None


class InSession(_Body):
    session_id: str


class FinishSession(_Body):
    reason: dict[str, Any] = {}
    detail: str | None = None


class Lora(_Body):
    rank: int
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(_Body):
    type: str = "adamw"


class CreateModel(InSession):
    model_seq_id: From0
    base_model: str
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()
    user_metadata: Metadata = None


class OfModel(_Body):
    model_id: str


class Place(OfModel):
    """What orders a training request."""

    seq_id: Seq


class OptimStep(Place):
    adam_params: dict[str, float] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(Place):
    path: Name | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSampler(Place):
    path: Name | None = None
    sampling_session_seq_id: From0 | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: Ttl | None = None
    user_metadata: dict[str, str] | None = None


class LoadWeights(_Body):
    model_id: str | None = None
    seq_id: Seq | None = None
    session_id: str | None = None
    model_seq_id: From0 | None = None
    base_model: str | None = None
    optimizer_config: Optimizer | None = None
    user_metadata: Metadata = None
    path: str
    optimizer: bool


class CreateSampler(InSession):
    sampling_session_seq_id: From0
    base_model: str | None = None
    model_path: str | None = None


class JoinSampler(_Body):
    sampling_session_id: str


class Sample(_Body):
    sampling_session_id: str
    seq_id: From0
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1


class Future(_Body):
    request_id: str
    allow_metadata_only: bool = False


class Cancel(_Body):
    request_id: str | None = None
    request_ids: list[str] | None = None


class FuturesTarget(_Body):
    type: Literal["sampling_session"]
    sampling_session_id: str
    cloned_sampler_id: From0 = 0


class Futures(_Body):
    target: FuturesTarget
    prev_cursor: From0 = 0
    timeout: Annotated[float, Field(allow_inf_nan=False)] | None = None
    retrieved_request_ids: list[str] = []


class TinkerPath(_Body):
    tinker_path: str


class SetTtl(_Body):
    ttl_seconds: Ttl | None = None
