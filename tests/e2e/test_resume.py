"""A schedule over a real run on two ranks, a worker killed in the middle of it, and the run going on.

The killed run is the unbroken one as far as it came: what the resumed run makes again is compared with it. Rollouts are
greedy and there is one update a step, so that two runs see the same answers but for ties that rounding decides.
"""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from ray_cluster import title

from kl_plugins.launch.plan import package_folder

pytestmark = pytest.mark.timeout(1200)

STEPS, SAVED, KILLED = 9, 4, 6
SCHEDULE = ["kl.controller.kind=log", "kl.controller.target=0.02", "kl.reference.reset_every=3"]
FRAMEWORKS = {
    "verl": (
        "WorkerDict",
        [
            "actor_rollout_ref.rollout.top_k=1",
            "algorithm.adv_estimator=reinforce_plus_plus",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=64",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64",
            "trainer.n_gpus_per_node=2",
            "ray_kwargs.ray_init.num_gpus=2",
        ],
    ),
    "openrlhf": (
        "PolicyModelActor",
        [
            "rollout.top_p=0.0001",
            "algo.advantage.estimator=reinforce",
            "train.batch_size=256",
            "train.micro_batch_size=64",
            "rollout.micro_batch_size=128",
            "actor.num_gpus_per_node=2",
            "ref.num_gpus_per_node=2",
        ],
    ),
}


def rows(out):
    """The steps by number; none before there is a file, and no line that is half written."""
    text = (out / "metrics.jsonl").read_text() if (out / "metrics.jsonl").exists() else ""
    return {row["step"]: row for row in map(json.loads, text[: text.rfind("\n") + 1].splitlines())}


@pytest.mark.parametrize("framework", list(FRAMEWORKS))
def test_killed_and_resumed(framework, tmp_path):
    if package_folder(framework) is None:
        pytest.skip(f"needs {framework}'s environment")
    worker, native = FRAMEWORKS[framework]
    out = tmp_path / "run"
    argv = [sys.executable, "-m", "kl_plugins.cli", "run", f"{framework}/grpo_k2", "--profile", "cpu", "--stall", "300"]
    argv += ["--steps", str(STEPS), "--save-every", str(SAVED), "--out", str(out), *SCHEDULE, *native]

    shown = kill_after(KILLED, worker, argv, out, tmp_path)
    assert "the command ended with status 1, after step" in shown
    assert "A worker process ended without an exception of its own" in shown
    assert f"to go on: --resume --out {out} (last checkpoint: " in shown
    unbroken = rows(out)
    assert max(unbroken) < STEPS

    resumed = subprocess.run([*argv, "--resume"], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert f"resumed at step {SAVED}: State(beta=" in (out / "log.txt").read_text()
    again = rows(out)
    assert list(again) == list(range(1, STEPS + 1))
    check_schedule(unbroken)
    check_schedule(again)
    for step in range(SAVED + 1, KILLED + 1):
        assert again[step]["kl/beta"] == pytest.approx(unbroken[step]["kl/beta"], rel=0.02)
        assert again[step]["kl/sampled"] == pytest.approx(unbroken[step]["kl/sampled"], abs=0.02)


def check_schedule(steps):
    """The reference is replaced after steps 3 and 6: KL 0 in the next one, and growing before. Beta follows."""
    assert [steps[n]["kl/reference_resets"] for n in range(1, 7)] == [0, 0, 0, 1, 1, 1]
    assert abs(steps[1]["kl/sampled"]) < 1e-3
    assert abs(steps[4]["kl/sampled"]) < 1e-3
    assert steps[3]["kl/sampled"] > 0.06  # a reference that was not replaced would be as far away after it
    assert abs(steps[5]["kl/sampled"]) < 0.03
    assert steps[2]["kl/beta"] == 0.5  # at step 1 there was nothing to learn
    assert 0.5 < steps[3]["kl/beta"] < steps[4]["kl/beta"] == steps[5]["kl/beta"] < 0.7


def kill_after(step, worker, argv, out, folder):
    """Run a command and kill one of its workers once it has made a step; returns what the command showed."""
    run = subprocess.Popen(argv, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 600
        while step not in rows(out):
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        family = psutil.Process(run.pid).children(recursive=True)
        os.kill(next(p.pid for p in family if worker in title(p)), signal.SIGKILL)
        shown, _ = run.communicate(timeout=300)
    finally:
        run.kill()
    assert run.returncode == 1, shown
    return shown
