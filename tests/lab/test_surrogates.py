import math

import pytest
import torch

from kl_plugins.lab import (
    TabularPolicy,
    best_baseline,
    exact_kl_gradient,
    full_surrogate,
    sampled_gradients,
    sampled_surrogate,
    sampling_variance,
    unbiasedness_gap,
)

LOGITS = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64)
COEFFICIENT = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)


def test_full_surrogate_by_hand():
    logits = torch.tensor([math.log(3), 0.0], dtype=torch.float64, requires_grad=True)  # π = (¾, ¼)
    loss = full_surrogate(logits, torch.tensor([2.0, -1.0]), baseline=0.5)
    assert loss.item() == pytest.approx(-(0.75 * 1.5 * math.log(0.75) + 0.25 * -1.5 * math.log(0.25)), abs=1e-15)
    loss.backward()
    # -Σ π(c-b)(1[y=0] - ¾) = -(¾·1.5·¼ + ¼·1.5·¾)
    assert logits.grad.tolist() == pytest.approx([-0.5625, 0.5625], abs=1e-15)


def test_sampled_surrogate_by_hand():
    logits = torch.tensor([math.log(3), 0.0], dtype=torch.float64, requires_grad=True)
    loss = sampled_surrogate(logits, torch.tensor([0, 0, 1, 0]), torch.tensor([2.0, -1.0]), baseline=0.5)
    assert loss.item() == pytest.approx(-(3 * 1.5 * math.log(0.75) - 1.5 * math.log(0.25)) / 4, abs=1e-15)
    loss.backward()
    assert logits.grad.tolist() == pytest.approx([-(3 * 1.5 * 0.25 + 1.5 * 0.75) / 4, 0.5625], abs=1e-15)
    assert sampled_gradients(logits, torch.tensor([2.0, -1.0]), 0.5).flatten().tolist() == pytest.approx(
        [-0.375, 0.375, -1.125, 1.125], abs=1e-15
    )


@pytest.mark.parametrize("baseline", [0.0, 1.7, -40.0])
def test_the_twins_agree_in_expectation_for_any_baseline(baseline):
    assert unbiasedness_gap(LOGITS, COEFFICIENT, baseline) < 1e-13


def test_the_gap_sees_a_coefficient_that_depends_on_being_drawn(monkeypatch):
    from kl_plugins.lab import surrogates

    plain = surrogates.sampled_surrogate
    monkeypatch.setattr(surrogates, "sampled_surrogate", lambda *args: plain(*args) * (1 + args[1].item()))
    assert surrogates.unbiasedness_gap(LOGITS, COEFFICIENT) > 0.1


def test_full_surrogate_descends_the_kl_of_each_state():
    policy, reference = TabularPolicy.random(3, 3, seed=1), TabularPolicy.random(3, 3, seed=2)
    with torch.no_grad():
        log_ratio = policy.logits.log_softmax(-1) - reference.logits.log_softmax(-1)
    loss = (policy.state_probabilities() * full_surrogate(policy.logits, -log_ratio)).sum()  # -k2': a penalty
    gradient = torch.autograd.grad(loss, policy.logits)[0].flatten()
    torch.testing.assert_close(gradient, exact_kl_gradient(policy, reference, per_state=True), rtol=0, atol=1e-14)


def test_sampling_variance_by_hand_and_over_draws():
    logits = torch.tensor([math.log(3), 0.0], dtype=torch.float64)
    coefficient = torch.tensor([2.0, -1.0], dtype=torch.float64)
    # gradients (-½, ½) with ¾ and (-¾, ¾) with ¼: squared distance 2·¼² times ¾·¼
    assert sampling_variance(logits, coefficient) == pytest.approx(2 * 0.25**2 * 3 / 16, abs=1e-15)
    assert sampling_variance(logits, coefficient, draws=8) == pytest.approx(2 * 0.25**2 * 3 / 128, abs=1e-15)
    with pytest.raises(ValueError, match="draws must be at least 1, got 0"):
        sampling_variance(logits, coefficient, draws=0)


def test_sampling_variance_is_seen_in_samples():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.multinomial(LOGITS.softmax(-1).expand(4000, -1), 4, replacement=True, generator=generator)
    leaf = LOGITS.expand(4000, -1).clone().requires_grad_(True)
    loss = sampled_surrogate(leaf, tokens, COEFFICIENT.expand(4000, -1)).sum()
    gradient = torch.autograd.grad(loss, leaf)[0]
    seen = float((gradient - gradient.mean(0)).square().sum(-1).mean())
    assert seen == pytest.approx(sampling_variance(LOGITS, COEFFICIENT, draws=4), rel=0.1)


def test_best_baseline_is_a_minimum():
    best = best_baseline(LOGITS, COEFFICIENT)
    least = sampling_variance(LOGITS, COEFFICIENT, baseline=best)
    assert all(sampling_variance(LOGITS, COEFFICIENT, baseline=best + d) > least for d in (-0.1, -0.001, 0.001, 0.1))
    # With two tokens every score is ±the same vector times the other's probability: b = c_0·¼ + c_1·¾, variance 0.
    logits = torch.tensor([math.log(3), 0.0], dtype=torch.float64)
    coefficient = torch.tensor([2.0, -1.0], dtype=torch.float64)
    assert best_baseline(logits, coefficient) == pytest.approx(2 * 0.25 - 0.75, abs=1e-15)
    assert sampling_variance(logits, coefficient, baseline=-0.25) == pytest.approx(0, abs=1e-15)
