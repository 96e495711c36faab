"""SQL and transactions: one file per protocol, each statement a named constant above the function that runs it."""
