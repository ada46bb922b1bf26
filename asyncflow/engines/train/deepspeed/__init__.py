"""DeepSpeed as a train engine: `engine.py` over `zero.py`."""
