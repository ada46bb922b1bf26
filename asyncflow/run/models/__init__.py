"""Models of a run: where one comes from, whether it can be run, its files on other machines, and its way to the Hub."""
