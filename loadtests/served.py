"""The coordinator that `serve` serves; it reads from the environment where the providers are."""

from __future__ import annotations

import os

from loadtests.decision_types import over_http
from loadtests.serve import PROVIDERS

coordinator = over_http(os.environ[PROVIDERS])
