"""The exceptions of the coordinator; each leaf carries a stable code and says whether a repeat is safe.

    CoordinatorError
    ├── DeclarationError              a decision type, source or sink is declared wrongly (raised when the module loads)
    ├── ConfigurationError            a limit or setting is out of its range
    ├── RateLimited                   a call's turn within its provider's rate would come after its deadline
    ├── RequestRefused                the caller can act on it; the api maps the code to a status
    │   ├── MalformedRequest          400 malformed-request            errors[] with JSON pointers
    │   ├── BodyTooLarge              413 body-too-large
    │   ├── IdempotencyKeyMissing     400 idempotency-key-missing
    │   ├── IdempotencyKeyInvalid     400 idempotency-key-invalid
    │   ├── Unauthenticated           401 unauthenticated
    │   ├── NoticeRefused             401 notice-refused               a provider's event whose sender was not proven
    │   ├── MissingScope              403 missing-scope
    │   ├── ClassNotAllowed           403 class-not-allowed            classes
    │   ├── OwnRequest                403 own-request                  nobody reviews what the same key asked for
    │   ├── NotFound                  404 not-found                    also another tenant's id: alike on purpose
    │   ├── UnknownDecisionType       404 unknown-decision-type
    │   ├── StaleVersion              409 stale-version                current_version
    │   ├── DecisionInFlight          409 decision-in-flight           decision, retry_after_ms
    │   ├── BudgetExhausted           409 budget-exhausted             budget, needed, available, resets_at
    │   ├── StateConflict             409 state-conflict               the thing is not in a state that allows it
    │   ├── Supplanted                409 superseded               another holds it now, or it has ended
    │   ├── PreconditionFailed        412 precondition-failed          current_version
    │   ├── StaleReview               412 stale-review                 etag, decision_status, moved
    │   ├── PreconditionRequired      428 precondition-required
    │   ├── IdempotencyKeyReused      422 idempotency-key-reused
    │   ├── TransitionRefused         422 transition-refused           the record kind forbids this change
    │   ├── QueueFull                 429 queue-full                   retry_after_ms
    │   ├── StreamsFull               503 streams-full                 retry_after_ms; as many follow as may
    │   ├── Draining                  503 draining                     retry_after_ms
    │   ├── ReviewUnconfirmed         503 review-unconfirmed           etag, unconfirmed, retry_after_ms; nobody knows whether it moved
    │   └── Overloaded                503 overloaded                   retry_after_ms; the database cannot be reached in time
    └── StoreError
        ├── CommitUnknown             an error during COMMIT: the transaction may or may not have happened
        └── SchemaOutdated            the database needs `coordinator migrate`

``retry`` tells a caller what a repeat does: ``same-key`` repeats safely with the same Idempotency-Key, ``new-key`` needs a new
one (this key now stands for another request or another answer), ``never`` means that the same request cannot succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

Retry = Literal["same-key", "new-key", "never"]


class CoordinatorError(Exception):
    """Root of all errors that this package raises on purpose."""

    code: ClassVar[str] = "coordinator-error"


class DeclarationError(CoordinatorError):
    """A declaration is wrong. ``where`` is ``file:line`` of the statement to mend."""

    code = "declaration-invalid"

    def __init__(self, message: str, where: str) -> None:
        super().__init__(f"{where}: {message}")
        self.where = where


class ConfigurationError(CoordinatorError):
    code = "configuration-invalid"


class RateLimited(CoordinatorError):
    """It was not made, and used up nothing."""

    code = "rate-limited"


class RequestRefused(CoordinatorError):
    """A request that is refused with a reason the caller can act on; ``extra`` becomes members of the problem document."""

    retry: Retry = "never"

    def __init__(self, detail: str, **extra: object) -> None:
        super().__init__(detail)
        self.detail = detail
        self.extra = extra


class MalformedRequest(RequestRefused):
    code = "malformed-request"
    retry = "same-key"

    def __init__(self, detail: str, errors: Sequence[tuple[str, str]] = ()) -> None:
        """``errors`` are pairs of a JSON pointer (RFC 6901) and what is wrong there."""
        listed = [{"pointer": pointer, "detail": what} for pointer, what in errors] or [
            {"pointer": "", "detail": detail}
        ]
        super().__init__(detail, errors=listed)


class BodyTooLarge(RequestRefused):
    code = "body-too-large"
    retry = "same-key"


class IdempotencyKeyMissing(RequestRefused):
    code = "idempotency-key-missing"
    retry = "same-key"


class IdempotencyKeyInvalid(RequestRefused):
    code = "idempotency-key-invalid"
    retry = "new-key"


class Unauthenticated(RequestRefused):
    code = "unauthenticated"
    retry = "same-key"


class NoticeRefused(RequestRefused):
    code = "notice-refused"


class MissingScope(RequestRefused):
    code = "missing-scope"
    retry = "same-key"


class ClassNotAllowed(RequestRefused):
    code = "class-not-allowed"
    retry = "same-key"


class OwnRequest(RequestRefused):
    code = "own-request"


class NotFound(RequestRefused):
    code = "not-found"


class UnknownDecisionType(RequestRefused):
    code = "unknown-decision-type"
    retry = "same-key"


class StaleVersion(RequestRefused):
    code = "stale-version"
    retry = "new-key"


class DecisionInFlight(RequestRefused):
    code = "decision-in-flight"
    retry = "same-key"


class BudgetExhausted(RequestRefused):
    code = "budget-exhausted"
    retry: Retry = "same-key"

    def __init__(self, detail: str, *, stored: bool = False, **extra: object) -> None:
        """``stored``: the decision was admitted, and this is what its key answers for ever."""
        super().__init__(detail, **extra)
        if stored:
            self.retry = "new-key"


class StateConflict(RequestRefused):
    code = "state-conflict"


class Supplanted(RequestRefused):
    code = "superseded"


class PreconditionFailed(RequestRefused):
    code = "precondition-failed"


class StaleReview(RequestRefused):
    code = "stale-review"


class ReviewUnconfirmed(RequestRefused):
    code = "review-unconfirmed"
    retry = "same-key"


class PreconditionRequired(RequestRefused):
    code = "precondition-required"


class IdempotencyKeyReused(RequestRefused):
    code = "idempotency-key-reused"
    retry = "new-key"


class TransitionRefused(RequestRefused):
    code = "transition-refused"


class QueueFull(RequestRefused):
    code = "queue-full"
    retry = "same-key"


class StreamsFull(RequestRefused):
    code = "streams-full"
    retry = "same-key"


class Draining(RequestRefused):
    code = "draining"
    retry = "same-key"


class Overloaded(RequestRefused):
    code = "overloaded"
    retry = "same-key"


class StoreError(CoordinatorError):
    code = "store-error"


class CommitUnknown(StoreError):
    code = "commit-unknown"


class SchemaOutdated(StoreError):
    code = "schema-outdated"
