"""One model over several ranks: `many_ranks.py` over what cuts it, and what the ranks exchange."""
