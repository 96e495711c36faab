"""The fixtures of the store's tests: the test's database for a superuser, too."""

from tests.store.conftest import root, root_url

__all__ = ["root", "root_url"]
