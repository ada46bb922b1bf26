"""The room where queue, engines, schedule, algorithm and weight sync meet.

    feed --put--> [transfer queue] --lease--> rollout --complete--> [transfer queue] --lease--> train
      ^                                          ^                                                |
      +-- ledger: what belongs to which step <---|------ consume, commit -------------------------+
                  board: which versions there are <----- publish ---------------------------------+

The loops (loop.py) are coroutines that see a queue client, the ledger, the board and one engine, and nothing else.
"""

SCHEDULES = {
    "synchronous": "asyncflow.workflows.synchronous:Synchronous",
    "periodic": "asyncflow.workflows.periodic:Periodic",
    "delayed": "asyncflow.workflows.delayed:Delayed",
    "sub_step": "asyncflow.workflows.sub_step:SubStep",
    "bounded": "asyncflow.workflows.bounded:Bounded",
}
