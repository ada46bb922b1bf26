"""Megatron-Core as a train engine: `engine.py` over `model.py`, `weights.py` and `tensors.py`."""
