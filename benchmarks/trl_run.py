"""TRL's half of against_trl.py, run by an interpreter that has TRL: GRPO on rows that AsyncFlow has put in order.

    python trl_run.py SETTINGS.json RESULT.json

SETTINGS: model, scorer (`final_answer`, or FILE:NAME), rows (prompt, a text or messages, and answer; in the order of training),
prompts_per_step, group_size, max_new_tokens, learning_rate, warmup_steps, betas, max_grad_norm, clip_low, clip_high, seed, steps,
num_threads, micro_batch (rows), generates_by, target (a folder for the model). RESULT: `seconds` (of each step, from commit to
commit) and `rewards` (mean of each step's responses).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from asyncflow.rewards.base import Sample
from asyncflow.rewards.final_answer import FinalAnswer
from asyncflow.user_file import named


class Clock(TrainerCallback):
    """When each step ended, from the first one's beginning, and what its responses scored."""

    def __init__(self) -> None:
        self.ended: list[float] = []
        self.rewards: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.ended.append(time.monotonic())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ended.append(time.monotonic())

    def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: dict[str, float], **__: Any) -> None:
        if "reward" in logs:
            self.rewards.append(logs["reward"])


def text_of(given: Any) -> str:
    """Text of a prompt or completion, which is messages where the prompt is."""
    return given if isinstance(given, str) else str(given[-1]["content"])


def main(settings: dict[str, Any], result: Path) -> None:
    torch.set_num_threads(settings["num_threads"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    score = FinalAnswer() if settings["scorer"] == "final_answer" else named(settings["scorer"])

    def accuracy(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        rows = zip(prompts, completions, completion_ids, answer, strict=True)
        return [score(Sample(text_of(p), text_of(c), {"answer": a}, tokenizer.eos_token_id in ids)) for p, c, ids, a in rows]

    rows = settings["prompts_per_step"] * settings["group_size"]
    clock = Clock()
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), settings["learning_rate"], tuple(settings["betas"]), weight_decay=0.0)
    warmup = LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / max(1, settings["warmup_steps"]))
    )  # transformers' own begins with 0
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=accuracy,
        args=GRPOConfig(
            output_dir=settings["target"],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            seed=settings["seed"],
            max_steps=settings["steps"],
            shuffle_dataset=False,
            per_device_train_batch_size=settings["micro_batch"],
            gradient_accumulation_steps=rows // settings["micro_batch"],
            num_generations=settings["group_size"],
            max_completion_length=settings["max_new_tokens"],
            use_transformers_continuous_batching=settings["generates_by"] == "continuous batching",
            temperature=1.0,
            num_iterations=1,
            beta=0.0,
            epsilon=settings["clip_low"],
            epsilon_high=settings["clip_high"],
            loss_type="dapo",
            max_grad_norm=settings["max_grad_norm"],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=tokenizer,
        callbacks=[clock],
        optimizers=(optimizer, warmup),
    )
    trainer.train()
    trainer.save_model(settings["target"])
    seconds = [after - before for before, after in zip(clock.ended, clock.ended[1:], strict=False)]
    result.write_text(json.dumps({"seconds": seconds, "rewards": clock.rewards}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
