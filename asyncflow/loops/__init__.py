"""The loops: coroutines that see a queue client, the ledger, the versions and one engine, and nothing else.

    feed --put--> [transfer queue] --lease--> rollout --complete--> [transfer queue] --lease--> train
      ^                                          ^                                                |
      +-- ledger: what belongs to which step <---|------ consume, commit -------------------------+
                policy versions                  <----- publish ---------------------------------+

algorithm1.py has feed, produce and train: Algorithm 1 (PA, section 4).
"""
