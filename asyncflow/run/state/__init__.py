"""State that a run keeps so that it can go on: checkpoints, the journal, and the way back from them."""
