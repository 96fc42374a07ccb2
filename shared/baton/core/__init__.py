"""Pure decisions: no clock, socket, randomness, file or log is touched below this package."""
