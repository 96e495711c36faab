"""The demo: an outside world to decide about, and the means to start it."""
