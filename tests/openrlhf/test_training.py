"""OpenRLHF's whole `ppo_train`: batching, ranks, epochs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import one_process, same

CLIP = {"estimator": "k2", "correction": "clip", "credit": "return"}


def test_repeatable_bit_for_bit(runs):
    weights = []
    for _ in range(2):
        run = runs(CLIP)
        run.train(run.experience())
        weights.append(run.weights())
    assert torch.equal(*weights)


@pytest.mark.parametrize("config", [CLIP, {"estimator": "k3", "form": "combined"}], ids=["decoupled", "combined"])
def test_micro_batches_against_one_batch(runs, config):
    whole, parts = (runs(config, False, "--train.micro_batch_size", size) for size in ("4", "2"))
    gradients = []
    for run in (whole, parts):
        batch = run.experience()
        status = run.train(run.experience())
        gradients.append(run.gradients_by_row())
        assert status["kl/rho_max"] == pytest.approx(max_ratio(run, batch), rel=1e-5)
    assert len(parts.seen) == 2
    assert gradients[0].keys() == gradients[1].keys()
    for row, gradient in gradients[0].items():
        assert gradient.abs().sum() > 0
        same(gradients[1][row], gradient)


def max_ratio(run, batch):
    """The largest rho over the whole batch, from what the policy really computed."""
    old = {tuple(s.tolist()): o for s, o in zip(batch.sequences, batch.action_log_probs, strict=True)}
    ratios = [
        ((logp - old[tuple(tokens.tolist())])[logp != 0]).exp().max().item()
        for seen in run.seen
        for tokens, logp in zip(seen.sequences, seen.logp.detach(), strict=True)
    ]
    return max(ratios)


def test_two_ranks_against_one(runs, model, tmp_path):
    run = runs(CLIP)
    run.train(run.experience())
    alone = run.gradients_by_row()
    port = free_port()
    command = [sys.executable, str(Path(__file__).with_name("rank.py")), str(model), str(tmp_path), str(port)]
    paths = [str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ranks = [subprocess.Popen([*command, str(rank)], env=environ) for rank in (0, 1)]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    both = {}
    for rank in (0, 1):
        result = torch.load(tmp_path / f"{rank}.pt")
        both |= result["gradients"]
        same(result["rho_max"], run.last_status["kl/rho_max"])
        same(result["k2"], run.last_status["kl/k2"])
    assert both.keys() == alone.keys()
    for row, gradient in alone.items():
        same(both[row] / 2, gradient)  # DeepSpeed averages over ranks what OpenRLHF scaled up by their number


def free_port() -> int:
    one_process()
    return int(os.environ["MASTER_PORT"])


def test_clip_changes_training_against_stock(runs):
    """One epoch on fresh data is on-policy, and the same; at the second the correction shows."""
    weights = {}
    for epochs in ("1", "2"):
        for name, config, flags in (
            ("stock", None, ["--algo.kl.use_loss", "--algo.kl.estimator", "k2"]),
            ("clip", {"estimator": "k2", "correction": "clip"}, []),
        ):
            run = runs(config, False, "--train.max_epochs", epochs, "--algo.kl.init_coef", "1", *flags)
            run.train(run.experience(on_policy=True))
            weights[name, epochs] = run.weights()
    same(weights["clip", "1"], weights["stock", "1"])
    moved = (weights["stock", "2"] - weights["stock", "1"]).abs().max()
    assert (weights["clip", "2"] - weights["stock", "2"]).abs().max() > 0.01 * moved
