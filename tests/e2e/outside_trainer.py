"""Somebody else's trainer: a plain PyTorch loop that trains a served run. GRPO with a clipped ratio, as recipes/quickstart.yaml.

python tests/e2e/outside_trainer.py ADDRESS KEY_FILE STEPS [LEARNING_RATE]
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from asyncflow.client import Client, GroupData

WARMUP, MAX_NORM, CLIP = 5, 1.0, (0.8, 1.28)


def loss_of(model: Any, group: GroupData) -> torch.Tensor:
    """The sum of the clipped losses of a group's tokens, one sequence for each response."""
    total = torch.zeros(())
    prompt = torch.tensor(group.prompt_ids)
    for ids, mask, advantages in zip(group.response_ids, group.loss_mask, group.advantages, strict=True):
        response = torch.tensor(ids)
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1).gather(1, response[:, None])[:, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        gain = torch.minimum(ratio * torch.tensor(advantages), ratio.clamp(*CLIP) * torch.tensor(advantages))
        total = total - (gain * torch.tensor(mask)).sum()
    return total


def train(address: str, key_file: str, steps: int, learning_rate: float) -> None:
    """Train until so many steps are committed, from wherever the run is."""
    with Client.connect(address, key_file=key_file) as client, tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(client.model(folder), dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        worker, done = client.join_trainers(), 0
        while done < steps:
            experience = worker.get_experience_data(tokens=4096)
            for group in experience.groups:
                loss_of(model, group).backward()
            if experience.groups:
                worker.acknowledge(experience.groups)
            if experience.normaliser is None:
                continue
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad is None else parameter.grad / experience.normaliser
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
            rate = learning_rate * min(1.0, (experience.step + 1) / WARMUP)
            for options in optimizer.param_groups:
                options["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
            weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
            done = worker.publish(experience.step, weights, grad_norm=norm, learning_rate=rate)
        worker.leave()


def main() -> None:
    address, key_file, steps, *rate = sys.argv[1:]
    torch.set_num_threads(1)
    train(address, key_file, int(steps), float(rate[0]) if rate else 1e-4)


if __name__ == "__main__":
    main()
