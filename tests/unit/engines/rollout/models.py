"""Small random models that engines are tested with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama(folder: Path, hidden_size: int) -> Path:
    """A Llama of two layers in this folder; norms are made different from 1, so that they count."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": hidden_size, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=512, eos_token_id=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder
