"""Supervision, with real processes: what they do stands in for a trainer, nothing here is a framework."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from kl_plugins.launch import process
from kl_plugins.launch.process import supervise

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def script(body: str) -> list[str]:
    return [sys.executable, "-u", "-c", textwrap.dedent(body)]


# Starts what Ray starts: a daemon in a session of its own, and a worker that nothing but its descent gives away
# (no environment, as after setproctitle), whose parent then dies. Writes their numbers to the file argv[1].
FAMILY = """
import os, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
daemon = subprocess.Popen(sleep, start_new_session=True)
middle = subprocess.Popen([sys.executable, "-c", '''
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={}, start_new_session=True)
print(worker.pid, flush=True)
time.sleep(2)
'''], stdout=subprocess.PIPE, text=True)
worker = int(middle.stdout.readline())
middle.wait()
with open(sys.argv[1] + ".new", "w") as f:
    f.write(f"{os.getpid()} {daemon.pid} {worker}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
"""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(process, "LOOK", 0.2)


def test_output_and_status(tmp_path):
    argv = script("import os, sys; print('out', os.environ['X']); print('err', file=sys.stderr); sys.exit(7)")
    ended = supervise(argv, {"X": "1"}, tmp_path / "log")
    assert (ended.why, ended.code, ended.left) == ("exit", 7, ())
    assert sorted((tmp_path / "log").read_text().split()) == ["1", "err", "out"]


def test_killed_by_signal(tmp_path):
    ended = supervise(script("import os; os.kill(os.getpid(), 9)"), {}, tmp_path / "log")
    assert (ended.why, ended.code) == ("exit", -9)


def test_timeout_ends_it(tmp_path):
    ended = supervise(SLEEP, {}, tmp_path / "log", lambda: True, timeout=0.5)
    assert (ended.why, ended.code, ended.left) == ("timeout", None, ())


def test_stall_is_counted_from_the_last_step(tmp_path):
    steps = iter([False, True, True])
    ended = supervise(SLEEP, {}, tmp_path / "log", lambda: next(steps, False), stall=1, timeout=60)
    assert ended.why == "stall"
    assert ended.seconds > 1  # not from the start


def test_tick_sees_what_came_last(tmp_path):
    seen = []
    supervise(script("open('done', 'w')"), {}, tmp_path / "log", lambda: seen.append(Path("done").exists()))
    Path("done").unlink()
    assert seen[-1]


def test_a_process_that_ignores_sigterm(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE", 0.5)
    argv = script("import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)")
    log = tmp_path / "log"
    ended = supervise(argv, {}, log, timeout=3)
    assert (ended.why, ended.left) == ("timeout", ())
    assert log.read_text() == "up\n"


@pytest.mark.parametrize("ending", ["time.sleep(600)", "pass", "1 / 0"], ids=["hangs", "ends", "fails"])
def test_no_process_is_left(tmp_path, quick, ending):
    note = tmp_path / "pids"
    other = subprocess.Popen(SLEEP)  # somebody else's, with the same command line
    try:
        argv = [sys.executable, "-c", FAMILY + ending, str(note)]
        ended = supervise(argv, {}, tmp_path / "log", timeout=5)
        assert ended.left == ()
        pids = [int(word) for word in note.read_text().split()]
        assert len(pids) == 3
        assert [pid for pid in pids if not gone(pid)] == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted(tmp_path, number):
    note = tmp_path / "pids"
    runner = f"""
    import sys
    from pathlib import Path
    from kl_plugins.launch import process
    process.LOOK = 0.2
    argv = [sys.executable, "-c", {FAMILY + "time.sleep(600)"!r}, {str(note)!r}]
    ended = process.supervise(argv, {{}}, Path({str(tmp_path / "log")!r}))
    print(ended.why, ended.code, len(ended.left))
    """
    run = subprocess.Popen(script(runner), stdout=subprocess.PIPE, text=True)
    try:
        while not note.exists():
            assert run.poll() is None
            time.sleep(0.1)
        run.send_signal(number)
        run.send_signal(number)  # an impatient second one must not interrupt the cleaning up
        out, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert out.split() == ["signal", str(int(number)), "0"]
    assert all(gone(int(pid)) for pid in note.read_text().split())


def test_handlers_are_given_back(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    supervise(script("pass"), {}, tmp_path / "log")
    assert signal.getsignal(signal.SIGINT) is before


def test_two_runs_do_not_touch_each_other(tmp_path):
    os.environ.pop(process.MARK, None)
    first = subprocess.Popen(SLEEP, env={**os.environ, process.MARK: "another"})
    try:
        supervise(script("pass"), {}, tmp_path / "log")
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()


def test_a_daemon_whose_parent_ends_at_once(tmp_path):
    """No look at the family happens in time: the daemon is known by its environment alone."""
    body = f"""
    import subprocess
    print(subprocess.Popen({SLEEP!r}, start_new_session=True).pid)
    """
    ended = supervise(script(body), {}, tmp_path / "log")
    assert (ended.why, ended.code) == ("exit", 0)
    assert gone(int((tmp_path / "log").read_text()))
