"""`drill`: the conflict and crash suite of `coordinator.testing`, as a command."""

from coordinator.testing.drill import drill

__all__ = ["drill"]
