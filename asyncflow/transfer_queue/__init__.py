"""The transfer queue: where samples live between the loops (AsyncFlow, section 3).

    client --- lease / fail / renew -------> controller (one per task) --- table: what is ready, leased, done, dead (pure)
       |                                          |  follows: which rows now have which columns
       |                                          v
       +------ put / complete / read ------> unit (one or more) ---------- storage: the columns themselves

A unit never decides which worker gets a sample, and a controller's table never sees one. Start with `client.py`, then `unit.py` and
`controller.py`; `queue.py` puts them together in one process, `node.py` in many.
"""

STORAGES = {
    "memory": "asyncflow.transfer_queue.storage.memory:MemoryStorage",
    "mooncake": "asyncflow.transfer_queue.storage.servers.mooncake:MooncakeStorage",
    "redis": "asyncflow.transfer_queue.storage.servers.redis:RedisStorage",
}
ASKED_STORAGES = frozenset({"redis"})
"""Storages that are opened and closed before a run starts, to see whether their server is there. It writes nothing."""
