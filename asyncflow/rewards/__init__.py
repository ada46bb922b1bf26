"""Rewards: a finished sample in, a number out. Scorers run in processes of their own that can be killed.

`pool.py` has the processes (`sandbox/`), `worker.py` is what runs in them: the scorers, built once, then each sample in a
fork, unless all of them are stateless.

`base.py` is the contract, `signatures.py` takes reward functions that were written for TRL or verl, `answers.py` finds the answer
in a text and `number_parsing.py` the number in an answer (`units.py`, `numerals.py`); `scorings.py` has what goes with the reward
processes: a reward model, sums, a value on failure, delays. A scorer that raises, hangs, exits, eats memory or returns no number
fails its sample with a `RewardFailure`; it never gives it a 0. The room contains mistakes, not malice: a scorer may read and write
what the user may. Its limits (seconds, memory) are `ProcessLimits` in `sandbox/limits.py`.
"""

REWARDS = {
    "exact_match": "asyncflow.rewards.exact_match:ExactMatch",
    "final_answer": "asyncflow.rewards.final_answer:FinalAnswer",
    "format": "asyncflow.rewards.format:Format",
    "length": "asyncflow.rewards.length:Length",
    "maths": "asyncflow.rewards.maths:Maths",
    "multiple_choice": "asyncflow.rewards.multiple_choice:MultipleChoice",
    "numeric": "asyncflow.rewards.numeric:Numeric",
    "reasoning_gym": "asyncflow.rewards.reasoning_gym:ReasoningGym",
    "regex": "asyncflow.rewards.regex:Regex",
}
