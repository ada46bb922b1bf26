"""Storages of a unit: memory, or a store that outlives its process (`servers/`: Redis, Mooncake)."""
