"""Baselines and norms (18)-(21), (79)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_plugins.shaping import batch_baseline, batch_norm, group_baseline, group_norm

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual.double(), torch.tensor(expected).double(), rtol=tolerance, atol=tolerance)


def test_by_hand():
    rewards, groups = torch.tensor([1.0, 3.0, 10.0, 20.0, 30.0]), ["a", "a", "b", "b", "b"]
    close(group_baseline(rewards, groups), [-1.0, 1.0, -10.0, 0.0, 10.0])
    close(batch_baseline(rewards), [-11.8, -9.8, -2.8, 7.2, 17.2])
    close(group_norm(rewards, groups), [-0.7071068, 0.7071068, -1.0, 0.0, 1.0])
    close(batch_norm(torch.tensor([0.0, 1.0, 2.0])), [-1.0, 0.0, 1.0])
    close(group_norm(rewards, groups, std_max=5.0), [-0.7071068, 0.7071068, -2.0, 0.0, 2.0])


def test_noise_is_not_blown_up():
    rewards = torch.tensor([0.99999, 1.00001, 0.99999, 1.00001])
    close(group_norm(rewards, [0] * 4), [-0.866, 0.866, -0.866, 0.866], 1e-3)
    close(group_norm(rewards, [0] * 4, std_min=0.1), [-1e-4, 1e-4, -1e-4, 1e-4], 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@given(value=st.floats(-100, 100, width=16), size=st.integers(1, 7))
def test_equal_rewards_and_groups_of_one_give_exactly_zero(dtype, value, size):  # case 23
    rewards = torch.full((size,), value, dtype=dtype)
    for shaped in (
        group_norm(rewards, [0] * size),
        group_norm(rewards, list(range(size))),
        group_norm(rewards, [0] * size, std_min=0.1),
        group_baseline(rewards, [0] * size),
        batch_norm(rewards),
        batch_baseline(rewards),
    ):
        assert shaped.dtype == dtype
        assert (shaped == 0).all()


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3)), min_size=1, max_size=20), st.permutations(range(20)))
def test_group_ids_are_only_names_and_order_does_not_matter(rows, order):
    rewards, groups = torch.tensor([r for r, _ in rows], dtype=torch.float64), [g for _, g in rows]
    order = [i for i in order if i < len(rows)]
    expected = group_norm(rewards, groups, std_min=0.1)
    named = group_norm(rewards, [f"uid-{g}" for g in groups], std_min=0.1)
    shuffled = group_norm(rewards[order], torch.tensor(groups)[order], std_min=0.1)
    torch.testing.assert_close(named, expected)
    torch.testing.assert_close(shuffled, expected[order])
    assert torch.isfinite(expected).all()


def test_empty_batch():
    assert group_norm(torch.empty(0), []).shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.tensor([1.0, float("nan")]), [0, 0]), "1 of 2 rewards are not finite, first at 1: nan"),
        ((torch.tensor([1.0, 2.0]), [0]), "1 group ids for 2 rewards"),
        ((torch.ones(2, 2), [0, 0]), "one a response"),
        ((torch.ones(2), [0, 0], 0.0), "std_min=0.0 must be > 0"),
        ((torch.ones(2), [0, 0], 2.0, 1.0), "std_min=2.0 is larger than std_max=1.0"),
    ],
)
def test_refusals(arguments, words):
    with pytest.raises(ValueError, match=words):
        group_norm(*arguments)
