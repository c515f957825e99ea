"""Noise of exact, top-k and baselined gradients: against enumeration, and the package's own functions against it."""

import itertools

import pytest
import torch

from kl_plugins import KLConfig
from kl_plugins.exact import kl_from_logits, kl_from_topk
from kl_plugins.lab import (
    TabularPolicy,
    exact_kl_gradient,
    gradient_moments,
    leave_one_out_moments,
    moments,
    scores,
    token_coefficients,
    topk_gradients,
)

POLICY = TabularPolicy.random(3, 2, seed=1)
REFERENCE = POLICY.near(0.9, seed=2)


def test_scores_are_gradients_of_log_probabilities():
    logp = POLICY.logp(POLICY.responses())
    for n, t in itertools.product(range(9), range(2)):
        (gradient,) = torch.autograd.grad(logp[n, t], POLICY.logits, retain_graph=True)
        torch.testing.assert_close(scores(POLICY)[n, t], gradient.flatten(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("k", range(4))
def test_topk_is_unbiased_and_is_what_the_package_does(k):
    """Its mean is the per-state gradient for every k, and each response's gradient is `kl_from_topk`'s."""
    gradients = topk_gradients(POLICY, REFERENCE, k)
    torch.testing.assert_close(
        moments(gradients, POLICY)[0], exact_kl_gradient(POLICY, REFERENCE, per_state=True), rtol=0, atol=1e-14
    )
    responses = POLICY.responses()
    states = POLICY.states(responses)
    all_logp, all_ref = POLICY.logits.log_softmax(-1)[states], REFERENCE.logits.detach().log_softmax(-1)[states]
    ids = all_logp.topk(k, dim=-1).indices
    kl = kl_from_topk(
        all_logp.gather(-1, ids),
        ids,
        all_ref.gather(-1, ids),
        labels=responses,
        logp=POLICY.logp(responses),
        ref_logp=REFERENCE.logp(responses),
    )
    for n in range(len(responses)):
        (gradient,) = torch.autograd.grad(kl[n].sum(), POLICY.logits, retain_graph=True)
        torch.testing.assert_close(gradients[n], gradient.flatten(), rtol=0, atol=1e-12)


def test_all_tokens_are_exact_kl_and_none_are_k2():
    responses = POLICY.responses()
    states = POLICY.states(responses)
    for n in range(len(responses)):
        out = kl_from_logits(POLICY.logits[states[n]], REFERENCE.logits[states[n]])
        (gradient,) = torch.autograd.grad(out.loss, POLICY.logits)
        torch.testing.assert_close(topk_gradients(POLICY, REFERENCE, 3)[n], gradient.flatten(), rtol=0, atol=1e-14)
    coefficients = token_coefficients(KLConfig("k2"), POLICY, REFERENCE)
    mean, variance = gradient_moments(coefficients, POLICY)
    none_mean, none_variance = moments(topk_gradients(POLICY, REFERENCE, 0), POLICY)
    torch.testing.assert_close(none_mean, mean, rtol=0, atol=1e-14)
    assert none_variance == pytest.approx(variance, rel=1e-12)


@pytest.mark.parametrize("credit", ["token", "return", "sequence"])
@pytest.mark.parametrize("group", [2, 3])
def test_leave_one_out_against_all_groups(credit, group):
    """Mean and variance over every possible group, one by one."""
    coefficients = token_coefficients(KLConfig("k2", credit=credit), POLICY, REFERENCE)
    score, p = scores(POLICY), POLICY.response_probabilities()
    first, second = 0.0, 0.0
    for members in itertools.product(range(len(p)), repeat=group):
        a, s = coefficients[list(members)], score[list(members)]
        baseline = (a.sum(0) - a) / (group - 1)
        gradient = torch.einsum("nt,ntp->p", a - baseline, s) / group
        probability = p[list(members)].prod()
        first, second = first + probability * gradient, second + probability * (gradient**2).sum()
    mean, variance = leave_one_out_moments(coefficients, POLICY, group)
    torch.testing.assert_close(mean, first, rtol=0, atol=1e-14)
    torch.testing.assert_close(mean, gradient_moments(coefficients, POLICY)[0], rtol=0, atol=1e-14)
    assert variance == pytest.approx(group * float(second - (first**2).sum()), rel=1e-10)


def test_a_leave_one_out_baseline_depends_on_the_cut():
    """Why it is no setting: the same four responses in one micro-batch of four, or two of two, pull differently.

    Without a baseline the two are the same, as `test_micro_batches_add_up_to_the_batch` of the head asks for.
    """
    coefficients = token_coefficients(KLConfig("k2", credit="sequence"), POLICY, REFERENCE)[[0, 4, 5, 8]]
    score = scores(POLICY)[[0, 4, 5, 8]]

    def gradient(rows, baseline):
        a = coefficients[rows]
        a = a - (a.sum(0) - a) / (len(a) - 1) if baseline else a
        return torch.einsum("nt,ntp->p", a, score[rows]) / 4

    for baseline in (False, True):
        whole = gradient([0, 1, 2, 3], baseline)
        cut = gradient([0, 1], baseline) + gradient([2, 3], baseline)
        assert torch.allclose(whole, cut, rtol=0, atol=1e-12) is not baseline


def test_a_baseline_under_a_clip_is_biased():
    """The other reason: an active set that looks at ratio and sign leaves E[w active ∇logp] away from 0."""
    behaviour = POLICY.near(0.8, seed=3)
    responses = POLICY.responses()
    rho = (POLICY.logp(responses) - behaviour.logp(responses)).sum(-1).exp().detach()
    c = token_coefficients(KLConfig("k2", credit="sequence"), POLICY, REFERENCE)[:, 0]
    active = ~((c > 0) & (rho < 0.8)) & ~((c < 0) & (rho > 1.2))
    weight = behaviour.response_probabilities() * rho
    score = scores(POLICY).sum(1)
    assert float((weight @ score).norm()) < 1e-12
    assert float(((weight * active) @ score).norm()) > 1e-2


def test_errors():
    with pytest.raises(ValueError, match="k=4 must be between 0 and the vocabulary, 3"):
        topk_gradients(POLICY, REFERENCE, 4)
    with pytest.raises(ValueError, match="group=1: leaving one out needs at least 2"):
        leave_one_out_moments(torch.zeros(9, 2), POLICY, 1)
