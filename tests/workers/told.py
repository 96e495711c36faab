"""A worker of the Python library that runs inside a test."""

from __future__ import annotations

import anyio
from anyio import to_thread

from coordinator.worker import Worker
from tests.workers.asking import Service


class Told:
    """A worker in this process that handles research by ``function``."""

    def __init__(self, service: Service, function: object) -> None:
        self.worker = Worker(service.address, service.key, name="here", max_tasks=2, drain_s=5)
        self.worker.handles("research")(function)  # type: ignore[type-var]  # a function of any kind

    async def asked(self, service: Service, type: str = "question") -> dict[str, object]:
        """The evidence that one question gets from it."""
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: self.worker.serve(stop_on_signals=False))
            findings: dict[str, object] = await to_thread.run_sync(service.ask(type=type).findings)
            self.worker.stop()
            group.cancel_scope.cancel()
        return findings
