"""Storages of a unit: memory, or a store that outlives its process (`key_value.py`, over Redis or Mooncake)."""
