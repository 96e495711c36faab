"""What the tests share: real servers, and waiting for a condition instead of for a time."""

from tests.support.waiting import eventually

__all__ = ["eventually"]
