"""Control of a run: which steps, versions and workers there are, and when things may happen. State machines; no loop, no engine, no
tensor.

modes.py, schedule.py    the five modes, and the contract that each of them keeps: when a prompt is admitted, a task starts,
                         weights are installed
ledger/                  which rows belong to which step, and what is left to do before it commits
policy_versions.py       which versions are published, and which worker serves which
worker_pool.py           which workers there are
progress_view.py         what a schedule sees of all this
"""

SCHEDULES = {
    "synchronous": "asyncflow.control.modes:Synchronous",
    "periodic": "asyncflow.control.modes:Periodic",
    "delayed": "asyncflow.control.modes:Delayed",
    "sub_step": "asyncflow.control.modes:SubStep",
    "bounded": "asyncflow.control.modes:Bounded",
}
