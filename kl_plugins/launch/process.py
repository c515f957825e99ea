"""Runs one command with a log, time limits, and no process left behind.

Ray starts daemons in sessions of their own, workers rewrite their title over their environment, and a dying parent
hands its children to process 1. So a run's processes are known in two ways: by descent, looked at while the run is
going on, and by an environment variable that only this run has. Nothing else is ever touched.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "KL_PLUGINS_RUN"
POLL = 0.25  # seconds between two looks at the child
LOOK = 2.0  # seconds between two looks at its descendants
GRACE = 5.0  # seconds from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        why: "exit" (by itself), "timeout", "stall" or "signal".
        code: the child's exit status after "exit" (negative: killed by that signal), the signal's number after
            "signal", else None.
        seconds: from start to end.
        left: processes that even SIGKILL did not end, described.
        logged: size of the log when the end began; what comes after it is about being ended.
    """

    why: str
    code: int | None
    seconds: float
    left: tuple[str, ...] = ()
    logged: int | None = None


def supervise(
    argv: list[str],
    env: Mapping[str, str],
    log: Path,
    tick: Callable[[], bool] = lambda: False,
    *,
    timeout: float = 0,
    stall: float = 0,
) -> Ended:
    """Run `argv` with `env` added to the environment and all output appended to `log`, until it ends or has to.

    `tick` is called about four times a second and once more at the end; it returns True if the run has moved on.
    The run is ended after `timeout` seconds, or `stall` seconds without moving on (0: never), or when this process is
    interrupted, terminated or hung up on. However it ends, no process of it is left.
    """
    mark = uuid.uuid4().hex
    start = moved = time.monotonic()
    look = start
    with open(log, "ab") as out, _caught_signals() as caught:
        child = subprocess.Popen(
            argv,
            env={**os.environ, **env, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        family = Family(child.pid, mark)
        why, code, left = "signal", None, ()
        try:
            while True:
                try:
                    why, code = "exit", child.wait(POLL)
                    break
                except subprocess.TimeoutExpired:
                    now = time.monotonic()
                if caught:
                    why, code = "signal", caught[0]
                    break
                if tick():
                    moved = now
                if timeout and now - start > timeout:
                    why = "timeout"
                    break
                if stall and now - moved > stall:
                    why = "stall"
                    break
                if now - look > LOOK:
                    look = now
                    family.look()
        finally:
            logged = log.stat().st_size
            left = family.end()
            child.poll()
        tick()
        return Ended(why, code, time.monotonic() - start, left, logged)


@contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP instead of dying of them; main thread only, as Python has it."""
    caught: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {s: signal.signal(s, lambda number, frame: caught.append(number)) for s in signals}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Family:
    """The processes of one run: descendants of `pid`, and whatever carries ``KL_PLUGINS_RUN=mark``."""

    def __init__(self, pid: int, mark: str):
        self.mark = mark
        self.known = {psutil.Process(pid)}

    def look(self) -> None:
        """Note descendants while they can still be told by descent, and forget the dead, whose numbers get reused."""
        self.known = {p for p in self.known if p.is_running()}
        pids = {p.pid for p in self.known}
        children: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter(["ppid"]):
            children.setdefault(process.info["ppid"], []).append(process)
        queue = list(pids)
        while queue:
            for process in children.get(queue.pop(), ()):
                if process.pid not in pids:
                    pids.add(process.pid)
                    self.known.add(process)
                    queue.append(process.pid)

    def alive(self) -> set[psutil.Process]:
        """Every process of the run that is still there, zombies aside: those are gone but for their parent."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    self.known.add(process)
            except psutil.Error:  # another user's, or gone meanwhile
                continue
        self.look()
        return {p for p in self.known if _lives(p)}

    def end(self) -> tuple[str, ...]:
        """End them all: SIGTERM, then SIGKILL, again until none is left; returns those that would not go."""
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
            alive = self.alive()
            for process in alive:
                try:
                    process.send_signal(number)
                except psutil.NoSuchProcess:
                    continue
            deadline = time.monotonic() + GRACE
            while alive and time.monotonic() < deadline:
                time.sleep(0.05)
                alive = {p for p in alive if _lives(p)}
        return tuple(str(p) for p in self.alive())


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
