"""Checkpoints on disk: what makes a folder of files one checkpoint, whole or not there at all.

folder.py    write, prove, choose and remove them

What is in the files is written by others: the train engine its state, the driver the rest (`run/state/saving.py`).
"""
