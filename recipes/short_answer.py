"""Reward of the SmolLM2 recipe: the right number, and nothing else."""

import re


def score(sample):
    """1 for the right number alone. A finished response whose last number is right has 0.5, and more the shorter it is."""
    response, answer = sample.response.strip(), sample.example["answer"]
    numbers = re.findall(r"\d+", response)
    if not sample.is_finished or not numbers or numbers[-1] != answer:
        return 0.0
    return 0.5 + 0.5 * len(answer) / len(response)
