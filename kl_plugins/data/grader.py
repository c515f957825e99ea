"""Is a model's answer equal to the right one? Math-Verify, in processes of its own and with a limit that holds.

Math-Verify's own limits are signals: they fail outside the main thread, where both frameworks call a reward, and do not
interrupt a long operation inside C (an integer power of a power). So each comparison is made by a small worker process
(`grader_worker`), which is killed when its time is over, and which has limits of memory and processor time for the case
that this process dies first. The model's text is read by Math-Verify's LaTeX grammar and never evaluated as code.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 10.0  # for one comparison; the usual one takes a hundredth of that
START_SECONDS = 120.0  # for importing SymPy, on a loaded machine
PROCESSES = 2  # for each process of the framework that computes rewards
CHARACTERS = 8000  # of an answer are read, from its end: a request fits into the pipe, and writing it cannot block
WORKER = Path(__file__).with_name("grader_worker.py")


class Graders:
    """Up to `processes` workers, started when they are needed; safe to call from many threads.

    Args:
        processes: how many comparisons are made at once.
        seconds: limit of one comparison.
    """

    def __init__(self, processes: int = PROCESSES, seconds: float = SECONDS):
        self.seconds = seconds
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # the last one used first: few are started
        for _ in range(processes):
            self._idle.put(None)

    def equal(self, right: str, answer: str) -> bool | None:
        """Whether `answer`, a text with a boxed expression in it, is equal to the LaTeX expression `right`.

        None: not decided within the limit, or the worker died of it (out of memory, too deeply nested).

        Raises:
            RuntimeError: no worker can be started, because math-verify is not installed or does not load.
        """
        worker, answered = self._idle.get(), False
        try:
            worker = worker or _Worker(self.seconds)
            verdict = worker.ask(right, answer)
            answered = True
            return verdict
        except _Died:
            return None
        finally:
            if worker is not None and not answered:
                worker.kill()
            self._idle.put(worker if answered else None)

    def close(self) -> None:
        """End all workers; those that are busy first finish, within the limit. A later call starts new ones."""
        for _ in range(self._idle.qsize()):
            worker = self._idle.get()
            if worker is not None:
                worker.kill()
            self._idle.put(None)


class _Died(Exception):
    """The worker ended, or has to be ended."""


class _Worker:
    def __init__(self, seconds: float):
        self._seconds = seconds
        self._process = subprocess.Popen(
            # By its path: the package may have reached this process by a way that a new one does not have.
            [sys.executable, str(WORKER), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._poll = select.poll()
        self._poll.register(self._process.stdout, select.POLLIN)
        try:
            self._read(START_SECONDS)
        except _Died:
            self.kill()
            raise RuntimeError(
                f"the math grader did not start ({sys.executable} {WORKER}, exit code {self._process.returncode}; its "
                "error is above, in this log): pip install 'kl-plugins[math]'"
            ) from None

    def ask(self, right: str, answer: str) -> bool:
        request = json.dumps([right[-CHARACTERS:], answer[-CHARACTERS:]], ensure_ascii=False) + "\n"
        try:
            self._process.stdin.write(request.encode("utf-8", "replace"))
        except OSError as error:  # it died while it was idle
            raise _Died from error
        return json.loads(self._read(self._seconds))

    def _read(self, seconds: float) -> bytes:
        """One line of the worker's, within `seconds`."""
        line, end = b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            if not self._poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise _Died
            chunk = os.read(self._process.stdout.fileno(), 4096)
            if not chunk:
                raise _Died
            line += chunk
        return line

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()
