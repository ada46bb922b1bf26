"""A process of its own, in which a decoder installs three times: prints what its weights take, and the process in bytes.

python install_memory.py (packed | plain)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import torch

from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.rollout import decoder as room
from asyncflow.engines.rollout.decoder import Decoder

SIZES = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 512, "attention_bias": True}


def new_decoder(**changes: int) -> Decoder:
    config = DecoderConfig.from_fields({"model_type": "llama", **SIZES, **HEADS, **changes})
    return Decoder(config, num_slots=6, max_context=224, dtype=torch.float32, device=torch.device("cpu"))


def peak() -> int:
    return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)


def main() -> None:
    if sys.argv[1] == "plain":
        room.can_pack = lambda dtype, device: False
    small = new_decoder(num_hidden_layers=1)  # oneDNN's code is there from here on
    small.install({name: torch.rand(shape) for name, shape in small.shapes.items()})
    tensors = {name: torch.rand(shape) for name, shape in new_decoder().shapes.items()}
    decoder, process = new_decoder(), psutil.Process()
    before, seen = process.memory_info().rss, []
    for _ in range(3):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of what follows
        decoder.install(tensors)
        seen.append((process.memory_info().rss - before, peak() - before))
    sizes = [tensor.nbytes for tensor in tensors.values()]
    print(json.dumps({"model": sum(sizes), "largest": max(sizes), "seen": seen}))


if __name__ == "__main__":
    main()
