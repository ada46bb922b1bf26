"""One model over several ranks: `many_ranks.py` over what shards it, and what the ranks exchange."""
