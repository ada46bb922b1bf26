"""Services of the driver, for its workers and for commands from outside."""
