"""Training with Megatron-Core (engine.py).

origins.py   where each weight comes from in a checkpoint, and how it is sharded
core.py      Megatron-Core itself under one layout: groups, a stage's model, the pipeline's schedule
stage.py     a process's share of a model, and the passes through it
tensors.py   the same share of weights and optimiser state, exchanged by Hugging Face names
"""
