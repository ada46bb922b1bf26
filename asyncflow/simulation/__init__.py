"""The same run under a virtual clock, with engines that sleep: as fast as its bookkeeping, and the same each time.

    Config, Costs, Faults --> SimulatedJob: the real Job, Driver, loops and queue --> metrics, spans, report
                                  |  in the places of sockets, processes, models:  |
                                  +-- Wire, SimulatedCluster, sleeping engines     +--> Audit: which laws were broken

    run.py      one run, by a seed
    audit.py    the laws, held against what crosses the wire
    seeds.py    many runs, in several processes

Nothing of the data or the model is read: prompts are as long as `Costs.lengths` says. Left out: a trainer that dies, after
which a real run is resumed from its newest checkpoint, and messages that are lost, which are the transport's to survive.
"""
