"""Checkpoints on disk: what makes a folder of files one checkpoint, whole or not there at all.

folder.py    write, prove, choose and remove them

What is in the files is written by others. A field of the driver's is in `DriverState` (`run/state/driver_state.py`), filled by
`run/state/saving.py`; one of a train engine's in `EngineState` (`engines/train/state.py`).
"""
