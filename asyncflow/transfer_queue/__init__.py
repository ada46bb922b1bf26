"""The transfer queue: where samples live between the loops (AsyncFlow, section 3).

    client --- lease / fail / renew -------> controller (one per task) --- table: what is ready, leased, done, dead (pure)
       |                                          ^
       |                                          | notices: these rows now have these columns
       +------ put / complete / read ------> unit (one or more) ---------- storage: the columns themselves

Control and data are apart: a controller never sees a sample, a unit never decides who gets one.
"""

STORAGES = {
    "memory": "asyncflow.transfer_queue.storage.memory:MemoryStorage",
    "mooncake": "asyncflow.transfer_queue.storage.mooncake:MooncakeStorage",
    "redis": "asyncflow.transfer_queue.storage.redis:RedisStorage",
}
