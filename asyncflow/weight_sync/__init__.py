"""How new weights travel from the trainer to the rollout workers.

    trainer                                          rollout worker
    export_weights -> publish(version) -> manifest   (by way of the board, which knows no weights)
                           |                  |
                           v                  v
                         bytes ---------> fetch(manifest) -> host memory, in the background
                                              |
                                              v
                                         install, fast, when the board grants it (the rollout engine's work)

A manifest names, sizes and hashes what was published; a worker whose copy does not match it is stale and serves nothing.
"""

from typing import Final

WEIGHT_SYNCS: Final = {"shared_memory": "asyncflow.weight_sync.shared_memory:SharedMemory"}
"""By name in a config: `module:class` of a `WeightSync`, imported when chosen."""
