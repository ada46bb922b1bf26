"""Rewards: a finished sample in, a number out. A scorer runs in processes of its own that can be killed.

      the run's process                           each worker: its own session and pipes, no torch
    +---------------------------+  Sample       +------------------------------------------------+
    | sandbox.RewardPool        | ------------> | worker.py: one scorer, one sample at a time    |
    |   FIFO over the workers,  | <------------ |   final_answer.FinalAnswer or a user's own     |
    |   deadline per sample     |  Scored/Failed|   memory limit; its prints go to "last words"  |
    +---------------------------+               +------------------------------------------------+
                 | who lives                                        ^
                 v                                                  | SIGKILL to the whole group
    +---------------------------+                                   |
    | guard.py                  | ----------------------------------+  when the run's process is gone
    +---------------------------+

`base.py` is the contract; `delays.py` makes rewards late on purpose. A scorer that raises, hangs, exits, eats memory or returns no
number fails its sample with a `RewardFailure`; it never gives it a 0. The room contains mistakes, not malice: a scorer may read and
write what the user may.
"""

REWARDS = {"final_answer": "asyncflow.rewards.final_answer:FinalAnswer"}
