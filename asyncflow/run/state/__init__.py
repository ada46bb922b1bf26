"""State that a run keeps so that it can be resumed: checkpoints, the journal, and the way back from them."""
