"""The recipes, run to the end by `kl-plugins run` on the CPU: verl's trainer, Ray workers and a vLLM rollout."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from ray_cluster import title

from kl_plugins.launch.plan import package_folder

pytestmark = [
    pytest.mark.skipif(package_folder("verl") is None, reason="needs verl's environment"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("recipe", ["grpo_k2", "grpo_k3", "ppo_k1_in_reward"])
def test_recipe(kl_run, recipe):
    in_reward = recipe == "ppo_k1_in_reward"
    controller = ["kl.controller.kind=log", "kl.controller.target=0.001"] if in_reward else []
    run = kl_run(f"verl/{recipe}", "--profile", "cpu", "--steps", 3, *controller)
    run.check(3)
    kl = run.config["kl"]
    if in_reward:
        assert (kl["estimator"], kl["placement"]) == ("k1", "reward")
        assert run.rows[-1]["kl"] == run.rows[-1]["actor/reward_kl_penalty"]
        betas = [row["kl/beta"] for row in run.rows]
        assert betas[0] == betas[1] == 0.01 < betas[2]
        assert betas == [row["actor/reward_kl_penalty_coeff"] for row in run.rows]
    else:
        assert (kl["estimator"], kl["placement"]) == (recipe[-2:], "loss")
        assert kl["correction"] == "clip"
        # What verl logs and adds to its loss is the plugin's matrix: the estimator's value, weighted by rho.
        plain = run.rows[-1][f"kl/{recipe[-2:]}"]
        assert plain / 10 < run.rows[-1]["actor/kl_loss"] < plain * 10
        assert run.rows[-1]["actor/kl_loss"] != plain


def test_every_option_acts(kl_run):
    """The command of the issue: another estimator, clipped, with return credit, by options alone."""
    options = ["--kl_estimator", "k2", "--kl_correction", "clip", "--kl_credit", "return"]
    run = kl_run("verl/grpo_k3", "--profile", "cpu", *options, "--steps", 4)
    run.check(4)
    kl = run.config["actor_rollout_ref"]["actor"]["policy_loss"]["kl"]
    assert (kl["estimator"], kl["correction"], kl["credit"]) == ("k2", "clip", "return")
    assert "k2 as loss descends reverse KL" in (run.out / "log.txt").read_text()
    # Several updates a step: the reported value is weighted by rho, and k2's plain mean is not.
    assert any(abs(row["actor/kl_loss"] - row["kl/k2"]) > 0.01 * row["kl/k2"] for row in run.rows)


def test_misspelt_key(kl_run):
    run = kl_run("verl/grpo_k2", "--profile", "cpu", "actor.kl_estimator=k2")
    assert run.code == 2
    assert "did you mean kl.estimator" in run.shown
    assert not run.out.exists()  # refused before anything was started


@pytest.mark.parametrize("where", ["everywhere", "workers"])
def test_plugin_that_fails_to_load(kl_run, tmp_path, where):
    """The run must die of it, and say so, whether the driver or only its Ray workers lack the plugin."""
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        f"if {where!r} == 'everywhere' or any('default_worker' in word for word in sys.orig_argv):\n"
        "    sys.modules['kl_plugins.verl.adapter'] = None\n"
    )
    env = {**os.environ, "PYTHONPATH": str(folder)}
    run = kl_run("verl/grpo_k2", "--profile", "cpu", "--steps", 2, "--stall", 240, env=env)
    assert run.code == 1, run.shown
    assert "cause: " in run.shown
    assert "kl_plugins.verl.adapter" in run.shown
    assert (run.out / "metrics.jsonl").read_text() == ""  # not one step


def test_interrupt_leaves_no_process(tmp_path):
    out = tmp_path / "run"
    argv = [sys.executable, "-m", "kl_plugins.cli", "run", "verl/grpo_k2", "--profile", "cpu", "--out", str(out)]
    run = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 300
        family = []
        while not any("WorkerDict" in p.info["cmdline"] for p in family):
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(1)
            family = psutil.Process(run.pid).children(recursive=True)
            for process in family:
                process.info = {"cmdline": title(process)}
        assert any("raylet" in p.info["cmdline"] for p in family)
        assert any("gcs_server" in p.info["cmdline"] for p in family)
        run.send_signal(signal.SIGINT)
        shown, _ = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130, shown
    assert "interrupted before the first step" in shown
    assert [(p.pid, p.info["cmdline"]) for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
