"""Where workers run. The same worker code runs in each of them.

local    one process per worker on this machine, spawned, ended by its control pipe (the default)
inline   coroutines in the driver's own process, for debugging

simulated.py, over the virtual time of clock.py and the wire of wire.py, is the place of `asyncflow simulate`; no run chooses it.
"""

CLUSTERS = {
    "local": "asyncflow.cluster.local:LocalCluster",
    "inline": "asyncflow.cluster.inline:InlineCluster",
}
