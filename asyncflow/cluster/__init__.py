"""Places where workers run. The same worker code runs in each of them.

local    one process per worker on this machine, ended by its control pipe (the default)
inline   coroutines in the driver's own process, for debugging
ray      one process per worker, placed by Ray on this machine or on several

simulated.py, over the virtual time of clock.py and the wire of wire.py, is the place of `asyncflow simulate`; no run chooses it.
"""

CLUSTERS = {
    "local": "asyncflow.cluster.local:LocalCluster",
    "inline": "asyncflow.cluster.inline:InlineCluster",
    "ray": "asyncflow.cluster.ray.cluster:RayCluster",
}
