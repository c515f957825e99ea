import itertools
import math

import pytest
import torch

from kl_plugins.lab import TabularPolicy


@pytest.mark.parametrize(("vocabulary", "length"), [(1, 3), (2, 1), (2, 4), (3, 3), (7, 2)])
def test_enumeration_is_complete_and_normalised(vocabulary, length):
    policy = TabularPolicy.random(vocabulary, length, seed=1)
    responses = policy.responses()
    assert (policy.vocabulary, policy.length) == (vocabulary, length)
    assert responses.tolist() == [list(y) for y in itertools.product(range(vocabulary), repeat=length)]
    assert float(policy.response_probabilities().sum()) == pytest.approx(1, abs=1e-14)
    assert float(policy.state_probabilities().sum()) == pytest.approx(length, abs=1e-13)
    assert policy.logits.dtype == torch.float64
    assert [p.shape for p in policy.parameters()] == [(sum(vocabulary**t for t in range(length)), vocabulary)]


def test_states_are_numbered_by_prefix():
    policy = TabularPolicy.random(3, 3)
    assert policy.states(torch.tensor([[0, 0, 0], [2, 1, 0], [1, 2, 2]])).tolist() == [[0, 1, 4], [0, 3, 11], [0, 2, 9]]


def test_logp_reads_the_row_of_the_prefix_and_carries_the_score():
    policy = TabularPolicy.from_probabilities([[0.5, 0.5], [0.75, 0.25], [0.1, 0.9]])
    logp = policy.logp(torch.tensor([[0, 1], [1, 1]]))
    assert logp.detach().exp().flatten().tolist() == pytest.approx([0.5, 0.25, 0.5, 0.9])
    logp[0, 1].backward()
    assert policy.logits.grad.flatten().tolist() == pytest.approx([0, 0, -0.75, 0.75, 0, 0])


def test_state_probabilities_by_hand():
    policy = TabularPolicy.from_probabilities([[0.2, 0.8], [0.75, 0.25], [0.1, 0.9]])
    assert policy.state_probabilities().tolist() == pytest.approx([1, 0.2, 0.8])


def test_same_seed_same_policy_and_near_moves_it():
    policy = TabularPolicy.random(3, 2, seed=5)
    assert torch.equal(policy.logits, TabularPolicy.random(3, 2, seed=5).logits)
    assert not torch.equal(policy.logits, TabularPolicy.random(3, 2, seed=6).logits)
    assert 0 < (policy.near(0.1, seed=1).logits - policy.logits).abs().max().item() < 1


def test_samples_follow_the_policy():
    policy = TabularPolicy.from_probabilities([[0.2, 0.8], [0.75, 0.25], [0.1, 0.9]])
    counts = torch.bincount(policy.sample(20_000, seed=3) @ torch.tensor([2, 1]), minlength=4) / 20_000
    # 5 standard deviations of a frequency near one half
    assert counts.tolist() == pytest.approx([0.15, 0.05, 0.08, 0.72], abs=5 * math.sqrt(0.25 / 20_000))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TabularPolicy(torch.zeros(5, 3)), "5 states do not fit a vocabulary of 3"),
        (lambda: TabularPolicy(torch.tensor([0.0, math.inf])), "finite"),
        (lambda: TabularPolicy.random(50, 5), "too many to enumerate"),
        (lambda: TabularPolicy.random(0, 2), "at least 1"),
        (lambda: TabularPolicy.from_probabilities([0.0, 1.0]), "positive"),
        (lambda: TabularPolicy.from_probabilities([0.4, 0.4]), "sum to 1"),
        (lambda: TabularPolicy.random(2, 3).logp(torch.zeros(1, 2, dtype=torch.long)), r"\[N, 3\]"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
