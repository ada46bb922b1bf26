"""Samplers, which choose the ready rows that each worker gets. Contract in `base.py`, the samplers beside it, chosen by a task's
`sampler` and `sampler_options`.

In a run these are `queue.samplers`, by task. What a sampler chooses is checked by `checks.py`.
"""

SAMPLERS = {
    "oldest": "asyncflow.transfer_queue.sampler.oldest:Oldest",
    "whole_groups": "asyncflow.transfer_queue.sampler.oldest:WholeGroups",
    "shortest_queue": "asyncflow.transfer_queue.sampler.shortest_queue:ShortestQueue",
    "token_balanced": "asyncflow.transfer_queue.sampler.token_balanced:TokenBalanced",
}
