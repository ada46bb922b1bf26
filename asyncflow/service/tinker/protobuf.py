"""Protobuf messages of the Tinker API: those that carry tensors. Older versions of the SDK use JSON for some of them.

The messages are declared here by the field numbers that the public SDK uses, with the fields that this server reads or writes; the
package `protobuf` does the rest. Enumerations are plain integers, which are the same bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

MEDIA_TYPE: Final = "application/x-protobuf"
FLOAT32, INT64 = 1, 2
"""Dtypes of tensors."""
STOP, LENGTH = 0, 1
"""Reasons why a sequence ended."""

_PACKAGE: Final = "asyncflow.tinker"
_MESSAGES: Final[dict[str, str]] = {
    "SparseCsr": "1 values bytes, 2 crow_indices bytes, 3 col_indices bytes",
    "Tensor": "1 dense bytes one, 2 sparse_csr SparseCsr one, 3 dtype int32, 4 shape int64 many",
    "BatchedTensor": "1 data bytes, 2 offsets bytes, 3 dtype int32, 4 trailing_shape int64 many",
    "ArrayRecord": "1 type_tag string, 2 fields BatchedTensor map, 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string, 2 loss_fn_outputs ArrayRecord many, 3 metrics double map",
    "LossConfigValue": "1 number double one, 2 text string one",
    "EncodedTextChunk": "1 tokens bytes",
    "OtherChunk": "",
    "Chunk": "1 encoded_text EncodedTextChunk one, 2 image OtherChunk one, 3 dmel OtherChunk one",
    "Datum": "1 model_input Chunk many, 2 loss_fn_inputs Tensor map",
    "ForwardBackwardRequest": (
        "1 model_id string, 2 seq_id int32, 3 data Datum many, 4 loss_fn string, 5 loss_fn_config double map, 6 forward_only bool, "
        "7 loss_fn_config_v2 LossConfigValue map"
    ),
    "SampledSequence": "1 stop_reason int32, 2 tokens bytes, 3 logprobs bytes",
    "SampleResponse": "1 sequences SampledSequence many, 2 prompt_logprobs bytes",
}
"""Fields of each message: number, name, type, and `many` for a list, `one` for a field of the message's only oneof, or `map` for a
mapping from names to such values."""


def message(name: str) -> Any:
    """New empty message of this name."""
    return _classes()[name]()


@cache
def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="asyncflow/tinker.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            _add_field(described, name, *field.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES}


def _add_field(described: Any, owner: str, number: str, name: str, kind: str, how: str = "") -> None:
    field = descriptor_pb2.FieldDescriptorProto
    added = described.field.add(name=name, number=int(number))
    added.label = field.LABEL_REPEATED if how in ("many", "map") else field.LABEL_OPTIONAL
    if how == "map":
        entry = described.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
        _set_type(entry.field.add(name="value", number=2, label=field.LABEL_OPTIONAL), kind)
        added.type, added.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{owner}.{entry.name}"
        return
    _set_type(added, kind)
    if how == "one":
        if not described.oneof_decl:
            described.oneof_decl.add(name="kind")
        added.oneof_index = 0


def _set_type(field: Any, kind: str) -> None:
    if kind in _MESSAGES:
        field.type, field.type_name = field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    else:
        field.type = getattr(field, f"TYPE_{kind.upper()}")
