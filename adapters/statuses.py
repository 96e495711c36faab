"""What a status of HTTP says about an effect, as a table that a sink's declaration may amend.

    2xx                                accepted
    4xx, but for those below           rejected: this request did not act and never will
    429, 503 with Retry-After          not-sent: the provider says it has not acted
    307 308                            rejected: the provider has moved; redirects are not followed
    409*  408 425  other 5xx and 3xx   ambiguous

    (* 409 from a provider that knows our key may mean that an earlier request with it is still running, as the IETF's
       Idempotency-Key draft has it. It then proves nothing about the effect; see ``conflict_means``.)

An amendment names one status, or a class such as ``5xx``; the status goes first: ``{404: "accepted", "5xx": "not-sent"}``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

from coordinator.core.effect import Guarantee, Keyed
from coordinator.errors import DeclarationError

Meaning: TypeAlias = Literal["accepted", "rejected", "not-sent", "ambiguous"]
Conflict: TypeAlias = Literal["in-flight", "refused"]
_CLASS = re.compile(r"[1-5]xx\Z")
_CODES: dict[Meaning, str] = {
    "accepted": "accepted",
    "rejected": "provider-refused",
    "not-sent": "provider-busy",
    "ambiguous": "provider-error",
}


class Verdict(NamedTuple):
    """``code`` is stable and kebab-case."""

    meaning: Meaning
    code: str


class Statuses:
    """The table of one sink. Raises `DeclarationError` for an amendment that is none."""

    def __init__(
        self,
        amended: Mapping[int | str, Meaning] | None,
        conflict_means: Conflict | None,
        guarantee: Guarantee,
        what: str,
        where: str,
    ) -> None:
        for status, meaning in (amended or {}).items():
            known = 200 <= status <= 599 if isinstance(status, int) else _CLASS.match(status)
            if not known or meaning not in get_args(Meaning):
                raise DeclarationError(
                    f"{what}: statuses: {status!r}: {meaning!r} is not a status such as 409 or '4xx' with one of "
                    f"{', '.join(get_args(Meaning))}",
                    where,
                )
        self._amended = dict(amended or {})
        self._conflict = conflict_means or ("in-flight" if isinstance(guarantee, Keyed) else "refused")

    def verdict(self, status: int, *, says_when: bool) -> Verdict:
        """``says_when``: the answer has a Retry-After that can be understood."""
        meaning = self._amended.get(status) or self._amended.get(f"{status // 100}xx")
        if meaning is not None:
            return Verdict(meaning, _CODES[meaning])
        if 200 <= status <= 299:
            return Verdict("accepted", "accepted")
        if status == 429 or (status == 503 and says_when):
            return Verdict("not-sent", "provider-busy")
        if status == 409 and self._conflict == "in-flight":
            return Verdict("ambiguous", "in-flight-at-provider")
        if status in (408, 425) or status >= 500:
            return Verdict("ambiguous", "provider-error")
        if status >= 400:
            return Verdict("rejected", "provider-refused")
        if status in (307, 308):
            return Verdict("rejected", "redirected")
        return Verdict("ambiguous", "unexpected-status")
