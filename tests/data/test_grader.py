"""Workers that hang, die or do not start; and, where math-verify is installed, what is equal to what."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kl_plugins.data import grader
from kl_plugins.data.grader import Graders

pytestmark = pytest.mark.timeout(300)
needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs math-verify (the extra `math`)"
)

# Speaks the worker's protocol. An answer is a command: its number of seconds to think, "die", or else compared as text.
STAND_IN = """
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    right, answer = json.loads(line)
    if answer == "die":
        os._exit(1)
    if answer.startswith("sleep"):
        time.sleep(float(answer.split()[1]))
    print(json.dumps(right == answer), flush=True)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    path = tmp_path / "worker.py"
    path.write_text(STAND_IN)
    monkeypatch.setattr(grader, "WORKER", path)
    pools = []

    def make(*args):
        pools.append(Graders(*args))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_a_worker_that_hangs_is_replaced(stand_in):
    graders = stand_in(1, 5.0)
    assert graders.equal("1", "1") is True
    assert graders.equal("1", "sleep 3600") is None
    assert graders.equal("1", "2") is False
    assert graders.equal("1", "1") is True


def test_a_worker_that_dies_is_replaced(stand_in):
    graders = stand_in(1, 10.0)
    assert graders.equal("1", "die") is None
    assert graders.equal("1", "1") is True


def test_threads_get_their_own_answers(stand_in):
    graders = stand_in(3, 60.0)
    answers = [str(i % 7) for i in range(200)]
    with ThreadPoolExecutor(16) as threads:
        verdicts = list(threads.map(lambda i: graders.equal(str(i % 5), answers[i]), range(200)))
    assert verdicts == [i % 5 == i % 7 for i in range(200)]


def test_text_that_no_pipe_and_no_encoding_likes(stand_in):
    graders = stand_in(1, 60.0)
    end = "ü" * 10 + "\n" + "語" * 10
    assert graders.equal(end, end) is True
    assert graders.equal("x", "\ud800") is False
    long = "a" * 10_000_000 + "b" * grader.CHARACTERS
    assert graders.equal("b" * grader.CHARACTERS, long) is True  # the end is what is read


def test_close_leaves_no_process(stand_in):
    graders = stand_in(2, 60.0)
    assert graders.equal("1", "1") is True
    [worker] = [w for w in graders._idle.queue if w is not None]
    graders.close()
    assert worker._process.returncode is not None
    assert graders.equal("1", "1") is True


def test_a_worker_that_does_not_start_says_why(tmp_path, monkeypatch, capfd):
    path = tmp_path / "worker.py"
    path.write_text("import no_such_module")
    monkeypatch.setattr(grader, "WORKER", path)
    with pytest.raises(RuntimeError, match=r"pip install 'kl-plugins\[math\]'"):
        Graders().equal("1", "1")
    assert "No module named 'no_such_module'" in capfd.readouterr().err


@pytest.fixture(scope="module")
def math():
    graders = Graders(1, 20.0)
    yield graders.equal
    graders.close()


@needs_math_verify
@pytest.mark.parametrize(
    ("right", "answer", "equal"),
    [
        ("42", "\\boxed{42}", True),
        ("42", "\\boxed{43}", False),
        ("\\frac{1}{2}", "so \\boxed{0.5}<|im_end|>", True),
        ("\\sqrt{8}", "\\boxed{2\\sqrt{2}}", True),
        ("x=3", "\\boxed{3}", True),
        ("1,2", "\\boxed{2, 1}", True),
        ("B", "\\boxed{\\text{B}}", True),
        ("B", "\\boxed{A}", False),
        ("42", "first \\boxed{1}, in the end \\boxed{42}", False),  # no hedging: two boxes are a set
        ("42", "it is $42$, not 7", False),  # a formula by the way is no answer
        ("42", "the number 42", False),
        ("42", "", False),
        ("", "\\boxed{}", False),
    ],
)
def test_equal(math, right, answer, equal):
    assert math(right, answer) is equal


@needs_math_verify
@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "(" * 3000 + "1" + ")" * 3000])
def test_an_answer_that_takes_forever_or_kills(answer):
    graders = Graders(1, 6.0)
    assert graders.equal("42", f"\\boxed{{{answer}}}") is None
    assert graders.equal("42", "\\boxed{42}") is True
    graders.close()


@needs_math_verify
@pytest.mark.parametrize("wrap", ["\\boxed{%s}", "\\boxed{\\text{%s}}", "the final answer is $%s$", "%s"])
def test_an_answer_is_never_executed(tmp_path, math, wrap):
    trap = tmp_path / "trap"
    for code in (f"__import__('os').system('touch {trap}')", f"exec(\"open('{trap}','w')\")"):
        assert math("42", wrap % code) is False
    assert not trap.exists()


@needs_math_verify
def test_a_busy_worker_does_not_outlive_its_parent():
    """The parent is killed while the worker computes: nobody is left to end it but its own limit."""
    script = (
        "from kl_plugins.data.grader import Graders\n"
        "import threading, time\n"
        "g = Graders(1, 4.0)\n"
        "assert g.equal('1', '\\\\boxed{1}')\n"
        "worker = g._idle.queue[0]\n"
        "worker._seconds = 3600\n"  # the parent's patience, not the worker's
        "threading.Thread(target=g.equal, args=('42', '\\\\boxed{9^{9^{9^{9}}}}')).start()\n"
        "time.sleep(0.5)\n"
        "print(worker._process.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    root = Path(grader.__file__).parents[2]
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=root)
    worker = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while alive(worker):
        time.sleep(0.2)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    os.kill(pid, 0)
    return state != "Z"
