"""`kl-plugins run` on OpenRLHF behaves as on verl; how OpenRLHF itself trains is in test_openrlhf_runs.py."""

import pytest

from kl_plugins.launch.plan import package_folder

pytestmark = [
    pytest.mark.skipif(package_folder("openrlhf") is None, reason="needs OpenRLHF's environment"),
    pytest.mark.timeout(900),
]


def test_recipe(kl_run):
    options = ["--kl_estimator", "k2", "--kl-correction", "clip", "--kl_credit", "return"]
    run = kl_run("openrlhf/grpo_k3", "--profile", "cpu", *options, "--steps", 3)
    run.check(3)
    kl = run.config["kl"]
    assert (kl["estimator"], kl["correction"], kl["credit"]) == ("k2", "clip", "return")
    # Several updates a step: the reported value is weighted by rho, and k2's plain mean is not.
    assert any(abs(row["kl"] - row["kl/k2"]) > 0.01 * row["kl/k2"] for row in run.rows)


def test_hanging_run(kl_run):
    """A reward file that is not there kills vLLM's actor, and OpenRLHF waits minutes for it: the run is ended."""
    words = ["--profile", "cpu", "--steps", 3, "reward.remote_url=/no/such/reward.py", "--stall", 200]
    run = kl_run("openrlhf/grpo_k2", *words)
    assert run.code == 124, run.shown
    assert "--stall" in run.shown
    assert "cause: FileNotFoundError: [Errno 2] No such file or directory: '/no/such/reward.py'" in run.shown
    assert "to do: Correct the path" in run.shown
