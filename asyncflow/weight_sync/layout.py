"""Layout of a safetensors file: the place of each tensor, a pure function of names, shapes and dtypes, the same at both ends.

    8 bytes: length of the header | header: JSON, filled up with spaces | the tensors' bytes without gaps

Both ends work the layout out from the tensors' specs, so a receiver checks a header by comparing bytes and never parses one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from asyncflow.types import TensorSpec
from asyncflow.weight_sync.base import WeightSyncError

_ALIGNMENT = 64
_CODES = {  # torch's name -> safetensors' name, bytes per element
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


class FileLayout:
    """`head`: the file up to its first tensor. `spans`: the tensors' first and last byte + 1 in the file, ascending."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        """Raises `WeightSyncError` for a dtype that has no name in safetensors."""
        self.specs = dict(specs)
        self.spans: dict[str, tuple[int, int]] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        # The widest first, as safetensors itself does, so that a reader which maps the file finds every tensor aligned.
        for name, spec in sorted(self.specs.items(), key=lambda item: (-_code(*item)[1], item[0])):
            code, itemsize = _code(name, spec)
            begin, end = end, end + math.prod(spec.shape) * itemsize
            header[name] = {"dtype": code, "shape": spec.shape, "data_offsets": (begin, end)}
            self.spans[name] = begin, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)
        self.head = len(text).to_bytes(8, "little") + text
        self.spans = {name: (begin + len(self.head), end + len(self.head)) for name, (begin, end) in self.spans.items()}
        self.num_bytes = len(self.head) + end


def _code(name: str, spec: TensorSpec) -> tuple[str, int]:
    if spec.dtype not in _CODES:
        raise WeightSyncError(f"tensor {name!r} is {spec.dtype}, which a safetensors file cannot hold")
    return _CODES[spec.dtype]
