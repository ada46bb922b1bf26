"""The train engine without shared prompts: each response of a micro-batch has its own copy, in one packed sequence."""

from __future__ import annotations

import math
from typing import Any

from asyncflow.engines.train.model import packing
from asyncflow.engines.train.torch_engine import TorchEngine


class Unshared(TorchEngine):
    """`TorchEngine`, of which a process holds one: what is changed is its module's."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """See `TorchEngine`."""
        packing.LEAST_TOKEN_RATIO = math.inf
        super().__init__(*arguments, **options)
