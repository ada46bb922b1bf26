"""Algorithms: each is one file that makes advantages from rewards, and a loss from a token batch.

    rewards of one group ---> advantages ---+
                                            v
    log-probs: policy, old, rollout, reference ---> loss: a sum over the micro-batch ---> gradient sums ---> / normaliser
               (TokenBatch, from the engine)             (LossSums)                        (at optim_step)

An algorithm knows neither engine nor queue nor schedule. It is put together from a surrogate (surrogate.py), what all losses have
(policy_loss.py), and advantages of its own; what another policy sampled is weighed by off_policy.py. docs/algorithms.md has them
all in one table. Nothing here imports torch when it runs, so that the driver can ask an algorithm for its normaliser; the tensors
that a loss is given bring their own operations.
"""

from typing import Final

ALGORITHMS: Final = {
    "cispo": "asyncflow.algorithms.cispo:CISPO",
    "dapo": "asyncflow.algorithms.dapo:DAPO",
    "dr_grpo": "asyncflow.algorithms.dr_grpo:DrGRPO",
    "grpo": "asyncflow.algorithms.grpo:GRPO",
    "gspo": "asyncflow.algorithms.gspo:GSPO",
    "ppo": "asyncflow.algorithms.ppo:PPO",
    "reinforce_plus_plus": "asyncflow.algorithms.reinforce_plus_plus:ReinforcePlusPlus",
    "rloo": "asyncflow.algorithms.rloo:RLOO",
}
"""By name in a config: `module:class`, imported when chosen."""
