"""Tinker's protobuf messages, from their published field numbers, and zstd bodies with a limit.

The descriptors are built here, in a pool of their own: the server needs no SDK, and an SDK in the
same process keeps its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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
    "ProvenanceSpan": (),
    "Datum": (
        "1 model_input Chunk[]",
        "2 loss_fn_inputs map:Tensor",
        "3 model_input_spans ProvenanceSpan[]",
        "4 loss_fn_input_spans ProvenanceSpan[]",
    ),
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
