"""The planner: from a configuration and a number of devices to a plan, how many of them do each task, and how it is sharded.

    config, hardware --cost--> Costs --graph--> tasks --bounds--> seconds that no run can be under --+
      |                          ^                                                                   v
      |                  spans (measured.py)                  enumerate -> memory -> bound -> simulate, best bound first
      +------------------------------------------------------------------> search -------------------+--> plan.yaml, plan.html

A cost is an amount of work (operations, bytes, messages) times what a unit of it takes: by the hardware's data sheet (*analytic*),
by a profile of this machine (*hybrid*), or it is a run's own time (*measured*). The simulated loops are those that train
(`simulation/`).
"""
