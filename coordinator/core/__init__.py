"""The nouns of the coordinator: pure values and rules, no I/O, no clock, no randomness."""
