"""Values and gradients inside OpenRLHF's own training step, against the oracle."""

import crossframework as shared
import pytest
import torch
from harness import same


@pytest.mark.parametrize("rollout", [False, True], ids=["", "sampler"])
@pytest.mark.parametrize("name", shared.CONFIGS)
def test_decoupled(runs, name, rollout):
    run = runs(shared.CONFIGS[name], rollout)
    metrics = run.step(run.shared_experience(rollout))
    value, gradient = shared.expected(name, rollout)
    same(metrics["kl"], (value * shared.token_mean()).sum())
    same(run.gradient(), shared.BETA * gradient * shared.token_mean())


def test_rows_count_as_documented(runs):
    """A cross-check of the factor between the frameworks: OpenRLHF's token mean against verl's seq-mean-token-mean."""
    run = runs({"estimator": "k2"})
    run.step(run.shared_experience())
    _, gradient = shared.expected("k2")
    same(run.gradient() * shared.FACTORS, shared.BETA * gradient * shared.seq_mean_token_mean())


def test_policy_loss_and_kl_add_up(runs):
    """Decoupled: the policy loss is OpenRLHF's with its own advantages, the KL comes beside it."""
    advantages = torch.tensor([[1.0], [-2.0], [0.5]]).expand(3, 5) * shared.MASK
    run = runs({"estimator": "k2", "correction": "clip"})
    run.step(run.shared_experience(advantages=advantages))
    _, gradient = shared.expected("k2 clip")
    policy = policy_gradient(advantages)
    same(run.gradient(), (policy + shared.BETA * gradient) * shared.token_mean())


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_combined(runs, estimator):
    """The advantage carries -beta C, and OpenRLHF's ratio and clip act on the sum (7), (70)."""
    advantages = torch.tensor([[1.0], [-2.0], [0.5]]).expand(3, 5) * shared.MASK
    run = runs({"estimator": estimator, "form": "combined"})
    metrics = run.step(run.shared_experience(advantages=advantages))
    value, coefficient = shared.expected(estimator)
    same(run.gradient(), policy_gradient(advantages - shared.BETA * coefficient) * shared.token_mean())
    same(metrics["kl"], (value * shared.token_mean()).sum())


def policy_gradient(advantages):
    """d(-min(rho A, clip(rho) A))/d(logp), worked by hand."""
    rho = (shared.LOGP.double() - shared.OLD.double()).exp()
    clipped = ((rho > 1.2) & (advantages > 0)) | ((rho < 0.8) & (advantages < 0))
    return torch.where(clipped, 0.0, -rho * advantages) * shared.MASK


def test_k1_in_reward_leaves_the_loss_alone(runs):
    run = runs({"estimator": "k1", "placement": "reward"})
    metrics = run.step(run.shared_experience())
    same(run.gradient(), torch.zeros(3, 5))
    assert "kl/k1" not in metrics


def test_metrics_are_the_packages(runs):
    from kl_plugins import KLConfig, kl_metrics

    config = shared.CONFIGS["k2 clip"]
    run = runs(config)
    metrics = run.step(run.shared_experience())
    batch = dict(mask=shared.MASK.bool(), old_logp=shared.OLD, config=KLConfig(**config))
    for name, value in kl_metrics(shared.LOGP, shared.REF, **batch).items():
        same(metrics[f"kl/{name}"], value)
    assert metrics["kl/clip_removed"] > 0


def test_without_flags_it_is_openrlhf(runs):
    """Bit for bit what OpenRLHF's own methods do, for each of its own settings."""
    from openrlhf.trainer.ray import ppo_actor

    trainer = ppo_actor.ActorPPOTrainer
    for native in (["k2"], ["k3"], ["k1", "--algo.kl.unbiased_gradient"]):
        gradients = []
        for stock in (False, True):
            run = runs(None, False, "--algo.kl.use_loss", "--algo.kl.estimator", *native)
            if stock:
                run.trainer.training_step = trainer.training_step.__wrapped__.__get__(run.trainer)
            metrics = run.step(run.shared_experience())
            gradients.append(run.gradient())
            assert not [name for name in metrics if name.startswith("kl/")]
        assert torch.equal(*gradients)
        assert gradients[0].abs().sum() > 0


def test_a_replaced_kl_is_noticed(runs, monkeypatch):
    from openrlhf.trainer.ray import ppo_actor

    run = runs({"estimator": "k2"})
    monkeypatch.setattr(ppo_actor, "compute_approx_kl", ppo_actor.compute_approx_kl.__wrapped__)
    with pytest.raises(RuntimeError, match="without asking kl_plugins"):
        run.step(run.shared_experience())


def test_non_finite_names_the_place(runs):
    run = runs({"estimator": "k2"})
    experience = run.shared_experience()
    experience.base_action_log_probs[1, 3] = float("nan")
    with pytest.raises(ValueError, match=r"ref_logp is not finite at 1 of 10 .*\[1, 3\]"):
        run.step(experience)
