"""Parts of a worker process: its connection to the run, its engines, scoring and episodes."""
