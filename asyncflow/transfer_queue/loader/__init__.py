"""Loader for other people's trainers: the rows of a task as batches of tensors. Nothing else in AsyncFlow imports it."""
