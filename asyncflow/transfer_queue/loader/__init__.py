"""Loader for other people's trainers, which no run of ours needs: the rows of a task as batches of tensors.

Nothing else in the package imports it. `StreamDataLoader` (`dataloader.py`) is for a loop that is not ours; the sampler
`token_balanced` is for the ranks of such a loop, and is chosen by its name.
"""
