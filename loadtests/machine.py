"""What the figures were measured on: without it they mean nothing."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

from loadtests.world import World

SYNCS = 100
PAGE = bytes(8192)


def environment(world: World) -> dict[str, str]:
    return {
        "cpu": f"{_cpu_model()}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "postgresql": world.sql("SHOW server_version"),
        "durability": ", ".join(
            f"{name} {world.sql(f'SHOW {name}')}"
            for name in ("fsync", "synchronous_commit", "full_page_writes")
        ),
        "disk": f"{_file_system(world.folder)}, one 8 KiB write with fdatasync takes {_sync_ms(world.folder):.2f} ms (median)",
        "revision": _revision(),
        "load": f"{os.getloadavg()[0]:.2f} over the minute before the run",
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU"
    )


def _file_system(folder: Path) -> str:
    """The type of the mount that holds the folder."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(place, kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
    return max(holding, key=lambda mount: len(mount[0]))[1]


def _sync_ms(folder: Path) -> float:
    path = folder / "sync-probe"
    took = []
    with path.open("wb", buffering=0) as probe:
        for _ in range(SYNCS):
            began = time.perf_counter()
            probe.write(PAGE)
            os.fdatasync(probe.fileno())
            took.append((time.perf_counter() - began) * 1000)
    path.unlink()
    return statistics.median(took)


def _revision() -> str:
    """Of the source tree that was measured; ``-dirty`` if it is not what was committed."""
    here = Path(__file__).parent
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=here, capture_output=True, text=True
    )
    return described.stdout.strip() or "not in a git repository"
