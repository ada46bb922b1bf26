"""Somebody else's inference: transformers' `generate` answers the prompts of a served run.

python tests/e2e/outside_generator.py ADDRESS KEY_FILE
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncflow.client import Client, PromptToAnswer, ResponseData

AT_ONCE = 8


def answer(model: PreTrainedModel, prompts: list[PromptToAnswer]) -> list[ResponseData]:
    """All responses to some prompts, in one batch, padded on the left."""
    each = [(row, prompt) for prompt in prompts for row in prompt.rows]
    longest, ends = max(len(prompt.prompt_ids) for _, prompt in each), model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    ids = torch.tensor([[ends[0]] * (longest - len(prompt.prompt_ids)) + prompt.prompt_ids for _, prompt in each])
    mask = torch.tensor([[0] * (longest - len(p.prompt_ids)) + [1] * len(p.prompt_ids) for _, p in each])
    drawn = model.generate(
        ids, attention_mask=mask, do_sample=True, temperature=prompts[0].temperature, top_k=0, top_p=1.0, pad_token_id=ends[0],
        max_new_tokens=prompts[0].max_new_tokens, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    tokens = drawn.sequences[:, longest:]
    logprobs = torch.stack(drawn.scores, 1).float().log_softmax(-1).gather(2, tokens[:, :, None])[:, :, 0]
    responses = []
    for number, (row, _) in enumerate(each):
        row_ids = tokens[number].tolist()
        stop = next((i + 1 for i, token in enumerate(row_ids) if token in ends), None)
        length = len(row_ids) if stop is None else stop
        reason = "length" if stop is None else "stop"
        responses.append(
            ResponseData(row=row, token_ids=row_ids[:length], logprobs=logprobs[number, :length].tolist(), finish_reason=reason)
        )
    return responses


def generate(address: str, key_file: str) -> None:
    """Generate until the run stops."""
    with Client.connect(address, key_file=key_file) as client, tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(client.model(folder), dtype=torch.float32).eval()
        worker = client.join_generators(num_slots=256)
        while not (work := worker.get_prompts_data(AT_ONCE)).is_over:
            if work.install is not None:
                weights = load_file(worker.fetch_weights(work.install, Path(folder) / "weights.safetensors"))
                model.load_state_dict(weights, strict=False)  # the head is tied
                worker.installed(work.install)
            elif work.prompts:
                with torch.inference_mode():
                    responses = answer(model, work.prompts)
                worker.put_experience_data(responses)


def main() -> None:
    torch.set_num_threads(1)
    generate(*sys.argv[1:])


if __name__ == "__main__":
    main()
