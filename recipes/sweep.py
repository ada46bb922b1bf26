"""A sweep: several low-rank adapters at once over one base, each trained with a learning rate of its own (docs/tinker.md).

    asyncflow serve --tinker recipes/models/tiny-arithmetic --listen 127.0.0.1:8321       # --max-models 8 for more than four rates
    export TINKER_BASE_URL=http://127.0.0.1:8321 TINKER_API_KEY=...                       # the start says where the key is
    python recipes/sweep.py recipes/models/tiny-arithmetic 1e-4 1e-3 1e-2

A client of Tinker's API, in an environment that has its SDK (`pip install tinker torch`). Each rate has an adapter and an
optimiser; requests of all are sent before any is waited for, so the server's engine samples from all adapters in the same passes.
Adapters begin with the same values, and see the same questions with the same noise: equal rates have equal rewards.
"""

import argparse
import random
import re
from typing import Any

import tinker
import torch
from tinker import types

QUESTION = "{name} has {first} coins. {name} finds {second}. How many coins does {name} have?\n"


def questions(step: int, number: int) -> list[tuple[str, int]]:
    """Questions of a step with their answers, the same ones for all adapters."""
    draw, asked = random.Random(step), []
    for _ in range(number):
        first, second = draw.randint(1, 9), draw.randint(1, 9)
        name = draw.choice(("Tom", "Ann", "Sam", "Mia", "Ben", "Eva"))
        asked.append((QUESTION.format(name=name, first=first, second=second), first + second))
    return asked


def reward(text: str, answer: int) -> float:
    """1 for the right number behind the last `####`."""
    numbers = re.findall(r"####\s*(\d+)", text)
    return float(bool(numbers) and int(numbers[-1]) == answer)


def datum(prompt: list[int], response: Any, advantage: float) -> types.Datum:
    """A response as a client trains on it; nothing of the prompt counts."""
    none = [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": torch.tensor(prompt[1:] + list(response.tokens)),
        "logprobs": torch.tensor(none + list(response.logprobs)),
        "advantages": torch.tensor(none + [advantage] * len(response.tokens)),
    }
    tokens = prompt + list(response.tokens[:-1])
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def made(value: Any) -> Any:
    """A client: newer SDKs return a future of it."""
    return value.result() if hasattr(value, "result") else value


def main() -> None:
    """Train an adapter for each rate, and print a table of rates and mean rewards by step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="the name that the server gives its model")
    parser.add_argument("rates", nargs="+", type=float, help="a learning rate for each adapter")
    for name, value in (("steps", 10), ("questions", 16), ("group", 8), ("rank", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    service = tinker.ServiceClient()
    models = [made(service.create_lora_training_client(given.model, rank=given.rank, seed=0)) for _ in given.rates]
    tokenizer, curves = models[0].get_tokenizer(), [list[float]() for _ in models]
    for step in range(given.steps):
        asked = [(tokenizer.encode(text), answer) for text, answer in questions(step, given.questions)]
        samplers = [made(model.save_weights_and_get_sampling_client()) for model in models]
        params = types.SamplingParams(max_tokens=32, temperature=1.0, seed=step)
        inputs = [types.ModelInput.from_ints(prompt) for prompt, _ in asked]
        sampled = [[sampler.sample(each, given.group, params) for each in inputs] for sampler in samplers]  # all at once
        under_way = []
        for model, rate, groups, curve in zip(models, given.rates, sampled, curves, strict=True):
            data, rewards = list[types.Datum](), list[float]()
            for (prompt, answer), future in zip(asked, groups, strict=True):
                responses = future.result().sequences
                scored = [reward(tokenizer.decode(response.tokens), answer) for response in responses]
                mean = sum(scored) / len(scored)
                pairs = zip(responses, scored, strict=True)
                data += [datum(prompt, response, each - mean) for response, each in pairs if each != mean]
                rewards += scored
            curve.append(sum(rewards) / len(rewards))
            if data:
                under_way.append(model.forward_backward(data, "importance_sampling"))
                under_way.append(model.optim_step(types.AdamParams(learning_rate=rate, eps=1e-8)))
        for future in under_way:
            future.result()
    print("learning rate" + "".join(f"{step:>7}" for step in range(given.steps)))
    for rate, curve in zip(given.rates, curves, strict=True):
        print(f"{rate:<13g}" + "".join(f"{mean:7.3f}" for mean in curve))


if __name__ == "__main__":
    main()
