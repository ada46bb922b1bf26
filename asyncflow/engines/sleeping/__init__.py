"""Engines without a model: they sleep as long as the work would take, on the event loop's clock.

    Costs    seconds of each piece of work, and how long responses are      (guessed, or measured: `planner/measured.py`)
    rollout.SleepingRolloutEngine     continuous batching: all active slots get a token at a time, as `costs.decode_step` says
    train.SleepingTrainEngine         one call after another, as in a compute thread, and passes of a call in its helpers
    train.SleepingCritic              values, and their training, likewise

consumes: what the real engines consume, and weights without tensors
waits for: the clock, and nothing else
is unblocked by: its timers; a call, when the present decode step has ended

Under a virtual clock (`cluster/clock.py`) a run takes as long as its bookkeeping; under a real one these engines show what the
loops themselves cost.
"""
