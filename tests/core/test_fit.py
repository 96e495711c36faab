"""What was found is of the declared type, or is said not to be, with where it is wrong."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from coordinator.core.fit import Misfit, fitted


class Rate(msgspec.Struct):
    value: int


class Checked(msgspec.Struct):
    value: int

    def __post_init__(self) -> None:
        if 1 // self.value:
            raise ValueError("one is no rate")


def test_what_fits_comes_back_as_plain_json() -> None:
    assert fitted(Rate(7), Rate) == {"value": 7}
    assert fitted({"value": 7}, Rate) == {"value": 7}


@pytest.mark.parametrize(
    ("value", "kind", "pointer"),
    [
        ({"value": "7"}, Rate, "/value"),
        ({}, Rate, "/value"),
        ({"value": math.nan}, dict, "/value"),
        ({"value": {1}}, list, ""),
        (object(), Rate, ""),
        ({"value": 1}, Checked, ""),
        ({"value": 0}, Checked, ""),
    ],
)
def test_what_does_not_fit_says_where_whatever_its_type_raises(value: Any, kind: Any, pointer: str) -> None:
    with pytest.raises(Misfit) as misfit:
        fitted(value, kind)
    assert misfit.value.pointer == pointer
    assert misfit.value.what
