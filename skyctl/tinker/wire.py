"""What Tinker's SDK sends and is sent: protobuf messages, from their published field numbers, zstd
bodies with a limit, and bodies of JSON requests. Their unknown fields are ignored, as the SDK does
with ours.

Descriptors of messages are built here, in a pool of their own: the server needs no SDK, and an SDK
in the same process keeps its own.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
"""Name of a checkpoint: part of its tinker:// path. It never becomes part of a path on disk."""
Seq = Annotated[int, Field(ge=1, le=2**62)]
From0 = Annotated[int, Field(ge=0, le=2**62)]
Ttl = Annotated[int, Field(ge=1, le=10 * 366 * 86400)]
Metadata = dict[str, Any] | None

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
STOP, LENGTH = 0, 1

_SCALARS = {
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "float": descriptor_pb2.FieldDescriptorProto.TYPE_FLOAT,
    "double": descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
}
# message -> fields "number name type", type with `[]` repeated, `?` optional, `|` in the single
# oneof, `map:` a map from strings
_MESSAGES = {
    "SparseCsr": ("1 values bytes", "2 crow_indices bytes", "3 col_indices bytes"),
    "Tensor": ("1 dense bytes|", "2 sparse_csr SparseCsr|", "3 dtype int32", "4 shape int64[]"),
    "EncodedTextChunk": ("1 tokens bytes",),
    "ImageChunk": ("1 data bytes", "2 format string"),
    "DmelChunk": ("1 dmel bytes",),
    "Chunk": ("1 encoded_text EncodedTextChunk|", "2 image ImageChunk|", "3 dmel DmelChunk|"),
    "Datum": ("1 model_input Chunk[]", "2 loss_fn_inputs map:Tensor"),
    "LossConfigValue": ("1 number double|", "2 text string|"),
    "ForwardBackwardRequest": (
        "1 model_id string",
        "2 seq_id int64",
        "3 data Datum[]",
        "4 loss_fn string",
        "5 loss_fn_config map:double",
        "6 forward_only bool",
        "7 loss_fn_config_v2 map:LossConfigValue",
    ),
    "BatchedTensor": (
        "1 data bytes",
        "2 offsets bytes",
        "3 dtype int32",
        "4 trailing_shape int64[]",
    ),
    "ArrayRecord": ("1 type_tag string", "2 fields map:BatchedTensor", "3 num_datums int32"),
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string",
        "2 loss_fn_outputs ArrayRecord[]",
        "3 metrics map:double",
    ),
    "TopkLogprobs": ("1 token_ids bytes", "2 logprobs bytes", "3 k int32", "4 length int32"),
    "SampledSequence": (
        "1 stop_reason int32",
        "2 tokens bytes",
        "3 logprobs bytes?",
        "4 topk_sampled_logprobs TopkLogprobs?",
    ),
    "SampleResponse": (
        "1 sequences SampledSequence[]",
        "2 prompt_logprobs bytes?",
        "3 topk_prompt_logprobs TopkLogprobs?",
        "4 prompt_cache_hit_tokens int32",
        "5 target_prompt_logprobs Tensor?",
    ),
}


class TooLarge(ValueError):
    """A body exceeds the limit, as received or unpacked."""


@cache
def message(name: str) -> Any:
    """The class of one message."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"skyctl.{name}"))


def unpack_zstd(body: bytes, limit_bytes: int) -> bytes:
    """The unpacked body.

    Raises:
        TooLarge: it would be larger than `limit_bytes`; no more than that was unpacked.
        ValueError: it is not zstd.
    """
    import zstandard

    unpacker = zstandard.ZstdDecompressor(max_window_size=1 << 27)
    try:
        with unpacker.stream_reader(body) as reader:
            unpacked = bytes(reader.read(limit_bytes + 1))
    except zstandard.ZstdError as error:
        raise ValueError(f"the body is not zstd: {error}") from error
    if len(unpacked) > limit_bytes:
        raise TooLarge(f"the body unpacks to more than {limit_bytes} bytes")
    return unpacked


@cache
def _pool() -> Any:
    file = descriptor_pb2.FileDescriptorProto(
        name="skyctl/tinker.proto", package="skyctl", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for text in fields:
            _add_field(described, *text.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


def _add_field(message: Any, number: str, name: str, kind: str) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    field = message.field.add(name=name, number=int(number), label=kinds.LABEL_OPTIONAL)
    if kind.startswith("map:"):
        entry = message.nested_type.add(
            name="".join(part.title() for part in name.split("_")) + "Entry"
        )
        entry.options.map_entry = True
        _add_field(entry, "1", "key", "string")
        _add_field(entry, "2", "value", kind.removeprefix("map:"))
        field.label, field.type = kinds.LABEL_REPEATED, kinds.TYPE_MESSAGE
        field.type_name = f".skyctl.{message.name}.{entry.name}"
        return
    bare = kind.rstrip("[]?|")
    if kind.endswith("[]"):
        field.label = kinds.LABEL_REPEATED
    elif kind.endswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="one")
        field.oneof_index = 0
    elif kind.endswith("?"):
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    if bare in _SCALARS:
        field.type = _SCALARS[bare]
    else:
        field.type, field.type_name = kinds.TYPE_MESSAGE, f".skyctl.{bare}"


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


class SaveExternal(Place):
    path: Name
    ttl_seconds: Ttl | None = None
    age_encryption_recipients: list[str] | None = None


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
