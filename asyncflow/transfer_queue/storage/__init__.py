"""Where a unit keeps columns: in memory, or in a store that outlives its process (`key_value.py`, over Redis or Mooncake)."""
