"""Storages in servers of other products, each named by a registry: `redis.py` and `mooncake.py`, over `key_value.py`."""
