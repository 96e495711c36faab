"""The coordinator that `serve` serves; it reads from the environment where the providers are."""

from __future__ import annotations

import os

from loadtests.serve import PROVIDERS
from loadtests.types import over_http

coordinator = over_http(os.environ[PROVIDERS])
