"""A low-rank adapter (LoRA) of all linear layers but the output layer, in plain transformers: y = x W^T + scaling (x A^T) B^T."""

import torch
from safetensors.torch import load_file


def add_adapter(model, file, alpha=32.0):
    """Freeze a model and add an adapter, whose first values are in a file; returns its parameters."""
    first, parameters = load_file(file), []
    model.requires_grad_(False)
    for name, linear in model.named_modules():
        if f"{name}.lora_A.weight" in first:
            pair = [torch.nn.Parameter(first[f"{name}.lora_{part}.weight"]) for part in "AB"]
            linear.register_forward_hook(hook(*pair, alpha / len(pair[0])))
            parameters += pair
    assert len(parameters) == len(first)
    return parameters


def hook(low, up, scaling):
    return lambda linear, inputs, output: output + (inputs[0] @ low.T) @ up.T * scaling
