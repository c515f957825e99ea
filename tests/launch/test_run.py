"""A run from start to end around a stand-in for the trainer: what is shown, written, and returned.

The frameworks themselves are run in tests/e2e.
"""

import io
import json
import sys

import pytest
from rich.console import Console

from kl_plugins.launch.metrics import JsonLines
from kl_plugins.launch.plan import LaunchError, Plan, fresh
from kl_plugins.launch.run import execute, summary

TRAINER = """
import json, os, sys, time
out, kl, steps, ending, start = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
with open(out, "a") as f:
    for i in range(start, steps):
        row = {"step": i + 1, "score": .3 + .1 * i, "pg": .1, "kl": .01 * i, "t": 2}
        f.write(json.dumps(row | ({"kl/coef_mean": .1 * i} if kl else {})) + chr(10))
print("trained")
exec(ending)
"""
NAMES = {"reward": ("score",), "kl": ("kl",), "pg_loss": ("pg",), "seconds": ("t",)}


@pytest.fixture
def run(tmp_path):
    def go(ending="pass", *, kl=1, steps=3, asked=3, prepare=None, start=0, **limits):
        lines = fresh(tmp_path / "lines.jsonl")
        plan = Plan(
            argv=[sys.executable, "-c", TRAINER, str(lines), str(kl), str(steps), ending, str(start)],
            env={},
            config="a: 1\n",
            kl={},
            poll=JsonLines(lines).poll,
            names=NAMES,
            latest=tmp_path / "latest",
            steps=asked,
            prepare=prepare,
        )
        text = io.StringIO()
        console = Console(file=text, width=120)
        code = execute(plan, "a title", tmp_path / "out", console=console, **({"timeout": 60, "stall": 0} | limits))
        return code, text.getvalue(), tmp_path / "out"

    return go


def test_a_good_run(run):
    code, shown, out = run()
    assert code == 0
    assert "     1/3     0.3000   0.000000   0.100000      2.0" in shown
    assert "done" in shown
    assert {p.name for p in out.iterdir()} == {"config.yaml", "log.txt", "metrics.jsonl", "report.png"}
    assert (out / "log.txt").read_text() == "trained\n"
    assert (out / "config.yaml").read_text().endswith("a: 1\n")
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("how", "code", "says"),
    [
        ({"ending": "raise ValueError('the cause')"}, 1, ["status 1, after step 3", "ValueError: the cause"]),
        ({"ending": "os._exit(5)", "steps": 0}, 1, ["status 5, before the first step", "trained"]),
        ({"ending": "os.kill(os.getpid(), 9)"}, 1, ["signal 9", "memory"]),
        ({"ending": "time.sleep(600)", "stall": 2}, 124, ["--stall", "after step 3"]),
        ({"ending": "time.sleep(600)", "timeout": 3}, 124, ["--timeout", "after step 3"]),
        ({"kl": 0}, 3, ["without kl/ metrics"]),
        ({"steps": 0}, 3, ["made no step"]),
        ({"asked": 9}, 3, ["after step 3 of 9", "epochs"]),
        ({"prepare": [sys.executable, "-c", "raise OSError(28, 'No space left on device')"]}, 1, ["Free disk space"]),
    ],
)
def test_a_bad_run(run, how, code, says):
    got, shown, out = run(**how)
    assert got == code
    assert [word for word in says if word not in shown] == []
    assert "done" not in shown
    assert str(out / "log.txt") in shown
    assert (out / "report.png").exists() is (how.get("steps") != 0 and "prepare" not in how)


def test_an_old_run_is_not_written_over(run):
    run()
    with pytest.raises(LaunchError, match="holds a run already"):
        run()


def test_a_resumed_run_goes_on_where_its_checkpoint_was(run, tmp_path):
    (tmp_path / "latest").write_text("global_step2")
    code, shown, out = run("raise OSError(28, 'No space left on device')", steps=4, asked=6)
    assert code == 1
    assert f"to go on: --resume --out {out} (last checkpoint: global_step2)" in shown
    code, shown, _ = run(steps=6, asked=6, start=2, resume=True)
    assert code == 0, shown
    assert "     3/6" in shown
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert "No space" in (out / "log.1.txt").read_text()
    assert (out / "log.txt").read_text() == "trained\n"


def test_a_resumed_run_that_dies_at_once_keeps_its_rows(run):
    run(steps=4, asked=6)
    code, shown, out = run("raise ValueError('the cause')", steps=0, asked=6, resume=True)
    assert code == 1
    assert "the cause" in shown
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4


def test_summary_compares_first_and_last_fifth():
    rows = [{"step": i, "reward": float(i), "kl": None} for i in range(1, 11)]
    text = io.StringIO()
    Console(file=text, width=120).print(summary(rows))
    line = next(line for line in text.getvalue().splitlines() if "reward" in line)
    assert "1.5" in line
    assert "9.5" in line
