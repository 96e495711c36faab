"""Sources and sinks that a deployer picks from or replaces; each satisfies a Protocol of `coordinator.core` structurally.

    http           HttpSource       evidence from a JSON answer to a GET, revision by ETag
    postgres       PostgresSource   evidence from one row of a database of yours
    records        RecordSource     evidence from a record of the coordinator's own database, checked under lock at commit
    function       FunctionSource   evidence from a Python function, plain or async
    webhook        WebhookSink      an effect as a signed POST with an idempotency key; reads its provider's signed notices
    http_sink      HttpSink         an effect as an HTTP request of any shape
    smtp           SmtpSink         an effect as a mail
    postgres_sink  PostgresSink     an effect as a change in a database of yours, exactly once

What all of them keep to: an expected result is returned, never raised; cancelling the caller is never swallowed; nothing that a
provider says is trusted for its size, type or spelling; secrets (headers, DSNs, query strings) are in no text that they make.
"""
