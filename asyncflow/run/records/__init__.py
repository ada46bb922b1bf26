"""Records of a run: its metrics, a row a step, its certificate, and checks on what is trained."""
