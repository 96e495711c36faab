"""The tour: seven decisions that go differently, each shown as it really went, and in the end the provider's ledger beside our receipts.

A complaint of a scene is printed and makes the tour disagree. Records and keys are new in each tour, so it can be taken again on the
same data.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from coordinator.core.canonical import canonical, digest
from coordinator.demo.guide import Refused, Tour
from coordinator.demo.run import Demo
from coordinator.demo.scenes import SCENES, Scene


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """``effects`` is what the provider's ledger holds in all, ``matched`` how many of these have their receipt here."""

    agrees: bool
    complaints: list[str]
    effects: int
    matched: int


async def tour(demo: Demo, out: Console, *, quiet: bool = False) -> Result:
    """Take the tour. ``quiet`` draws nothing."""
    began_quiet, out.quiet = out.quiet, quiet
    try:
        async with aiohttp.ClientSession() as http:
            taken = Tour(demo, http, out)
            for number, scene in enumerate(SCENES, start=1):
                title, _, explanation = (scene.__doc__ or "").partition(".")
                out.print(Rule(f"{number} · {title}", align="left", style="blue"))
                taken.say(explanation.strip(), "italic")
                out.print()
                await _play(scene, taken)
                out.print()
            return await _compare(taken)
    finally:
        out.quiet = began_quiet


async def _play(scene: Scene, tour: Tour) -> None:
    try:
        await scene(tour)
    except Refused as refused:
        tour.complain(str(refused))


async def _compare(tour: Tour) -> Result:
    """The provider's ledger against our receipts, key by key: all of them, of earlier tours too."""
    tour.out.print(Rule("The provider's ledger beside our receipts", align="left", style="blue"))
    ledger = await tour.ledger()
    operations = {op["key"]: op async for op in tour.all("operations")}
    receipts = {r["operation"]: r async for r in tour.all("receipts", kind="operation.succeeded")}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("key", "happened", "payload", "our state", "attempts", "receipt"):
        table.add_column(column, no_wrap=column == "key", overflow="fold")
    matched = 0
    for key in sorted({*ledger, *operations}):
        effect, operation = ledger.get(key), operations.get(key)
        receipt = receipts.get(operation["id"]) if operation else None
        wrong = _disagreement(effect, operation, receipt)
        matched += wrong is None and effect is not None
        if wrong:
            tour.complain(f"{key}: {wrong}")
        if operation is None or operation["id"] in tour.operations:
            table.add_row(*_row(key, effect, operation, receipt, wrong))
    tour.out.print(Padding(table, (0, 0, 1, 2)))
    agrees = not tour.complaints
    earlier = len(ledger) - table.row_count
    also = f", {earlier} of them from before" if earlier > 0 else ""
    tour.say(
        f"{matched} of {len(ledger)} effects have happened once, with their receipt{also}",
        "bold green" if agrees else "bold red",
    )
    return Result(agrees=agrees, complaints=tour.complaints, effects=len(ledger), matched=matched)


def _disagreement(effect: Any, operation: Any, receipt: Any) -> str | None:
    if operation is None:
        return "the provider has an effect that we know nothing of"
    if effect is None:
        return "we say that it succeeded, the provider knows nothing of it" if receipt else None
    if effect["count"] != 1:
        return f"happened {effect['count']} times"
    if operation["state"] != "succeeded" or receipt is None:
        return f"it happened, and we say {operation['state']}"
    if digest(canonical(effect["payload"])) != operation["payload_hash"]:
        return "the provider was sent something else than was committed"
    return None


def _row(key: str, effect: Any, operation: Any, receipt: Any, wrong: str | None) -> list[Text | str]:
    return [
        Text(key, "red" if wrong else ""),
        f"{effect['count']} ×" if effect else "–",
        Text(operation["payload_hash"][7:19] if operation else "–", "dim"),
        operation["state"] if operation else "–",
        str(operation["attempts"]) if operation else "–",
        f"#{receipt['index']}" if receipt else "–",
    ]
