"""Samplers, which choose the ready rows that each worker gets. Contract in `base.py`; chosen by a task's `sampler` and
`sampler_options`, in a run by `queue.samplers`. What a sampler chooses is checked by `checks.py`.

The samplers of runs are here: `oldest` and `whole_groups`, and `shortest_queue`, which a user may choose for a run's task.
`token_balanced`, for the data loaders of other people's trainers, is in `loader/`.
"""

SAMPLERS = {
    "oldest": "asyncflow.transfer_queue.sampler.oldest:Oldest",
    "whole_groups": "asyncflow.transfer_queue.sampler.oldest:WholeGroups",
    "shortest_queue": "asyncflow.transfer_queue.sampler.shortest_queue:ShortestQueue",
    "token_balanced": "asyncflow.transfer_queue.loader.token_balanced:TokenBalanced",
}
