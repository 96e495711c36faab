"""The crash sweep: a server is killed (SIGKILL) at every edge between two stages, and what it left behind is audited.

For each failpoint a server of its own is started that dies there. A caller posts to it, its connection breaks, and it does what a
careful caller does: it repeats with the same key, at another server. However far the dead one had come, there must be one decision,
one version and one effect in the end.
"""

from __future__ import annotations

from coordinator.failpoints import POINTS
from coordinator.testing.audit import Verdict, audit, contiguous
from coordinator.testing.world import Reply, World, until


async def killed_at(world: World, point: str) -> Verdict:
    """Die at ``point``, repeat elsewhere, audit."""
    verdict = Verdict(scenario=f"kill -9 at {point}", invariants="I1 I5 I7 I12")
    if world.start is None:
        verdict.skipped = "needs server processes of its own"
        return verdict
    dying = world.start(f"{point}=kill").start()
    world.servers.append(dying.url)
    key, record, site = world.name(f"kill-{point}"), world.name(f"kill-{point}"), world.name("site")
    try:
        told = await world.quote(key, record, site=site, server=2)

        async def dead() -> bool:
            """the server dies at its failpoint"""
            return dying.returncode is not None

        await until(dead, seconds=10)
    finally:
        world.servers.pop()
        if dying.returncode is None:
            dying.kill()
    again = await _repeated(world, key, record, site)
    verdict.expect(again.status in (200, 201), f"the repeat was answered {again.status} {again.raw[:200]!r}")
    if told.status == 201:
        verdict.expect(again.raw == told.raw, "the repeat was told something else than the first caller")
        verdict.lost += again.status != 200
    if again.status in (200, 201):
        verdict.expect(again.body["status"] == "committed", f"it ended as {again.body['status']}")
        await audit(world, verdict, [again.body["id"]])
        history = await contiguous(world, verdict, "drill-quote", record)
        verdict.expect(len(history) == 1, f"{len(history)} versions were made")
        await _receipts(world, verdict, again.body["id"])
    return verdict


async def _repeated(world: World, key: str, record: str, site: str) -> Reply:
    async def answered() -> Reply | None:
        """the same key is answered elsewhere"""
        reply = await world.quote(key, record, site=site)
        return None if reply.status in (0, 202, 409, 429, 503) else reply

    reply: Reply = await until(answered)
    return reply


async def _receipts(world: World, verdict: Verdict, decision: str) -> None:
    """Each state was entered once (I12)."""
    kinds = [receipt["kind"] for receipt in await world.all_of(f"/v1/receipts?decision={decision}")]
    for kind in ("decision.running", "decision.committed", "operation.succeeded"):
        verdict.expect(kinds.count(kind) == 1, f"{kinds.count(kind)} receipts of {kind}")


ELSEWHERE = ("claim.", "ask.", "resolve.", "notice.")
POINTS_TO_DIE_AT = tuple(point for point in POINTS if not point.startswith(ELSEWHERE))
