"""Code that runs in vLLM's own environment, where AsyncFlow may not be installed: this folder alone is on its PYTHONPATH."""
