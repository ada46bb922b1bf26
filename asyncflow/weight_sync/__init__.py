"""Weight sync: the way of new weights from the trainer to the rollout workers.

    trainer                                          rollout worker
    export_weights -> publish(version) -> manifest   (by way of `PolicyVersions`, which knows no weights)
                           |                  |
                           v                  v
                  the last versions ----> fetch(manifest) -> whole and verified in host memory, in the background
                                              |
                                              v
                                         install, when `PolicyVersions` grants it (the rollout engine's work)

    files.py            the versions that are retained: files in memory
    staging.py          casting, copying and hashing; the copy of a worker that reads no file
    shared_memory.py    the workers of one machine hold these files, and install from them
    door.py             where a sender is asked, and how a receiver gets there: for the two that follow
    collective.py       a broadcast to all workers at once; group.py: its members, and how they find each other
    network.py          one receiver per machine pulls them over TCP, for all workers there
    sleeping.py         for simulated runs: it takes its time, and carries nothing

A manifest names, sizes and hashes what was published; a worker whose copy does not match it is stale and serves nothing.
"""

from typing import Final

from asyncflow.weight_sync.base import WeightSyncFacts

WEIGHT_SYNCS: Final = {
    "shared_memory": "asyncflow.weight_sync.shared_memory:SharedMemory",
    "collective": "asyncflow.weight_sync.collective:Collective",
    "network": "asyncflow.weight_sync.network:Network",
}
"""By name in a config: `module:class` of a `WeightSync`, imported when chosen."""
WEIGHT_SYNC_FACTS: Final = {
    "shared_memory": WeightSyncFacts(),
    "collective": WeightSyncFacts(has_door=True, is_broadcast=True),
    "network": WeightSyncFacts(has_door=True, needs_key=True),
}
"""Facts that the driver asks of each, without importing torch. Any other class has its own as `facts`."""
