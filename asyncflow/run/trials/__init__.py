"""Trials without a run: scorers on some rows, and timings of a layer and of all tasks."""
