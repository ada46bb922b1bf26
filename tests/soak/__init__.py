"""Hours of faults on whole real runs: `make soak-run`."""
