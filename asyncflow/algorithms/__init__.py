"""What is optimised: each algorithm is one file that turns rewards into advantages, and a token batch into a loss.

    rewards of one group ---> advantages ---+
                                            v
    log-probs: policy, old, rollout, reference ---> loss: a sum over the micro-batch ---> gradient sums ---> / normaliser
               (TokenBatch, from the engine)             (LossSums)                        (at optim_step)

An algorithm knows neither engine nor queue nor schedule. What another policy sampled is weighed by off_policy.py. Nothing here
imports torch when it runs, so that the driver can ask an algorithm for its normaliser; the tensors that a loss is given bring their
own operations.
"""

from typing import Final

ALGORITHMS: Final = {"grpo": "asyncflow.algorithms.grpo:GRPO"}
"""By name in a config: `module:class`, imported when chosen."""
