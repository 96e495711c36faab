"""Start a process of our own and know when it is ready: the parent's half, and the child's.

The child prints one line of JSON on stdout once it can serve; `launch` returns then, with that line as
`ready`. Further output is read (so that the child never blocks on a full pipe) and its last lines are kept.
Stderr is the parent's, or goes to a file. The parent stops its child in the end with SIGTERM, and SIGKILL
when that does not help; a parent that is killed can do neither, so the child asks the kernel to be told
(`die_with_parent`). The kernel tells it when the *thread* that started it ends: start children from a thread
that lives as long as they may, in practice the main one. The async entry does so and only waits elsewhere.
"""

import collections
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import anyio
import anyio.to_thread

_KEPT_LINES = 200
_PR_SET_PDEATHSIG = 1
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


class LaunchFailed(Exception):
    """The child ended, or the time ran out, before it printed its line."""


class Process:
    """A child and its first line of JSON; `with` and `async with` start it (unless it runs already) and stop it.

    `env` is added to the parent's environment. After `kill` or `stop` it can be started again.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        log: Path | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._args = list(args)
        self._env = env
        self._cwd = cwd
        self._log = log
        self._timeout_s = timeout_s
        self._child: subprocess.Popen[str] | None = None
        self._first_line: Future[dict[str, Any]] = Future()
        self.output: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)

    @property
    def ready(self) -> dict[str, Any]:
        """What the child printed when it became ready."""
        return self._first_line.result(timeout=0)

    @property
    def pid(self) -> int:
        """Of the child that was started last."""
        return self._started.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative for a signal, as in `subprocess`."""
        return self._started.poll()

    def command(self) -> list[str]:
        """The arguments of the next start."""
        return self._args

    def start(self) -> Self:
        """Start the child and wait for its line, or raise LaunchFailed."""
        self._spawn()
        self._wait_ready()
        return self

    async def start_async(self) -> Self:
        """As `start`, without blocking the event loop."""
        self._spawn()
        try:
            await anyio.to_thread.run_sync(self._wait_ready)
        except BaseException:
            self.kill()
            raise
        return self

    def stop(self, grace_s: float = 15.0) -> int:
        """SIGTERM, after `grace_s` SIGKILL; returns the exit code. Does nothing to a child that has ended."""
        child = self._started
        child.terminate()
        try:
            return child.wait(grace_s)
        except subprocess.TimeoutExpired:
            return self.kill()

    def kill(self) -> int:
        """SIGKILL, and wait until the kernel has taken the child away."""
        self._started.kill()
        return self._started.wait()

    async def stop_async(self, grace_s: float = 15.0) -> int:
        """As `stop`, without blocking the event loop."""
        returncode = 0
        with anyio.CancelScope(shield=True):
            returncode = await anyio.to_thread.run_sync(self.stop, grace_s)
        return returncode

    @property
    def _started(self) -> subprocess.Popen[str]:
        if self._child is None:
            raise LaunchFailed("not started")
        return self._child

    @property
    def _running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def _spawn(self) -> None:
        if self._running:
            raise LaunchFailed("already running")
        command = self.command()
        self._first_line = Future()
        log = self._log.open("ab") if self._log else None
        try:
            self._child = subprocess.Popen(
                command,
                env={**os.environ, **(self._env or {})},
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        finally:
            if log:
                log.close()
        assert self._child.stdout is not None
        arguments = (self._child.stdout, self._first_line)
        threading.Thread(target=self._read, args=arguments, name="child-output", daemon=True).start()

    def _read(self, stdout: IO[str], first_line: "Future[dict[str, Any]]") -> None:
        with stdout:
            for line in stdout:
                if not first_line.done() and line.startswith("{"):
                    first_line.set_result(json.loads(line))
                else:
                    self.output.append(line.rstrip("\n"))
        if not first_line.done():
            first_line.set_exception(
                LaunchFailed(f"{self._args} ended before it was ready: {[*self.output]}")
            )

    def _wait_ready(self) -> None:
        try:
            self._first_line.result(self._timeout_s)
        except TimeoutError:
            self.kill()
            raise LaunchFailed(f"{self._args} was not ready in {self._timeout_s} s") from None

    def __enter__(self) -> Self:
        return self if self._running else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        return self if self._running else await self.start_async()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop_async()


def launch(
    args: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    timeout_s: float = 30.0,
) -> Process:
    """Start `args` and return once it has printed its line of JSON; LaunchFailed when it does not."""
    return Process(args, env=env, cwd=cwd, log=log, timeout_s=timeout_s).start()


def python_module(module: str, *args: str) -> list[str]:
    """The command that runs a module with this interpreter; pair it with `package_environment()`."""
    return [sys.executable, "-m", module, *args]


def package_environment() -> dict[str, str]:
    """Lets a child import the package from where we imported it, whatever its working directory."""
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (_PACKAGE_ROOT, inherited)))}


class Providers(Process):
    """The demo providers as a child that dies with us. Started again, they keep their port and ledger."""

    def __init__(self, data: Path, *, port: int = 0, fsync: bool = False, log: Path | None = None) -> None:
        super().__init__([], env=package_environment(), log=log)
        self.data = data
        self.port = port
        self.fsync = fsync

    @property
    def url(self) -> str:
        """`http://127.0.0.1:port`"""
        return str(self.ready["url"])

    def command(self) -> list[str]:
        """Built at each start: the port is known after the first."""
        if self._first_line.done() and self._first_line.exception() is None:
            self.port = int(self.url.rpartition(":")[2])
        return python_module(
            "coordinator.demo.providers",
            *("--port", str(self.port), "--data", str(self.data)),
            *("--die-with-parent", str(os.getpid())),
            *(["--fsync"] if self.fsync else []),
        )


def die_with_parent(parent: int = 0, number: signal.Signals = signal.SIGTERM) -> None:
    """In a child: ask the kernel (prctl(2), Linux) for a signal when the parent ends.

    `parent` is the pid the parent gave us, if it did: when it is already gone, so are we.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent and os.getppid() != parent:
        sys.exit(f"the parent {parent} has ended")
