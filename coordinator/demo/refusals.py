"""What a demo provider refuses, as one exception with a stable code.

The leaves raise it with a code and a sentence; only the HTTP layer knows which status a code has.

    not-found                 no such route, customer, currency, country or effect
    method-not-allowed        the route exists, not with this method
    malformed-request         a body, parameter or control table that says nothing usable
    idempotency-key-missing   an effect without its key
    idempotency-key-invalid   not 1..255 visible ASCII characters
    idempotency-key-reused    the key was used inside its window with another payload
    ledger-broken             a write or fsync of the ledger failed; nothing is performed until a restart
"""


class Refusal(Exception):
    """The request changes nothing; `code` is one of the module's table, `detail` is for a person."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
