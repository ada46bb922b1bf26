"""A plug-in of vLLM's, which finds it by the entry point beside it: layers have their matrices the other way, as the kernels of
some hardware want them (`quantization: turned`), or their methods have (`packed`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def register() -> None:
    """Tell vLLM of it."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

    class TurnedMethod(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: Any) -> None:
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous(), requires_grad=False)

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            found = x @ layer.weight
            return found if bias is None else found + bias

    class PackedMethod(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: Any) -> None:
            self.packed = layer.weight.detach().t().contiguous()

        def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            found = x @ self.packed
            return found if bias is None else found + bias

    @register_quantization_config("turned")
    class Turned(QuantizationConfig):
        method = TurnedMethod

        def get_name(self) -> str:
            return "turned"

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.float32, torch.bfloat16]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> Turned:
            return cls()

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            return self.method() if isinstance(layer, LinearBase) else None

    @register_quantization_config("packed")
    class Packed(Turned):
        method = PackedMethod

        def get_name(self) -> str:
            return "packed"
