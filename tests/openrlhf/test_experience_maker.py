"""KL in the reward, and the clipped group norm, inside OpenRLHF's own experience maker."""

import crossframework as shared
import pytest
import torch
from harness import arguments, as_flags, maker, same, samples

from kl_plugins import KLConfig, kl_metrics

K1 = {"estimator": "k1", "placement": "reward"}


@pytest.fixture(autouse=True)
def transport(runs, monkeypatch):
    """`maker` puts an identity in place of Ray; give Ray back after each test."""
    from openrlhf.trainer.ppo_utils import experience_maker

    monkeypatch.setattr(experience_maker, "ray", experience_maker.ray)


def batches(rewards=(1.0, 0.0, 1.0)):
    return [samples(slice(0, 2), list(rewards[:2]), [2, 0]), samples(slice(2, 3), list(rewards[2:]), [1])]


def logps(x):
    return [(x * shared.MASK)[:2], (x * shared.MASK)[2:]]


@pytest.mark.parametrize("config", [K1, {**K1, "estimator": "k2"}], ids=["k1", "k2"])
def test_kl_in_reward(model, config):
    native = ["--algo.advantage.estimator", "reinforce", "--algo.advantage.gamma", "0.5"]
    args = arguments(model, *as_flags(config), *native)
    args.algo.advantage.no_std_norm, args.rollout.n_samples_per_prompt = True, 1
    local = maker(args, logps(shared.LOGP), logps(shared.REF), beta=0.5)
    made = local.make_experience(batches())
    ell = (shared.LOGP - shared.REF).double() * shared.MASK
    penalty = ell if config["estimator"] == "k1" else ell**2 / 2
    same(torch.cat([b.kl for b in made]), penalty)
    for batch, rows in zip(made, (slice(0, 2), slice(2, 3)), strict=True):
        wanted = kl_metrics(
            shared.LOGP[rows], shared.REF[rows], mask=shared.MASK[rows].bool(), config=KLConfig.from_mapping(config)
        )
        for name, value in wanted.items():
            same(batch.info[f"kl/{name}"], [value] * len(batch.rewards))
        assert batch.base_action_log_probs is None

    made = local.compute_advantages_and_returns(made)
    reward = -0.5 * penalty
    for row, (last, r) in enumerate([(4, 1.0), (3, 0.0), (2, 1.0)]):
        reward[row, last] += r
    to_go = torch.zeros(3, 6, dtype=torch.float64)
    for t in reversed(range(5)):
        to_go[:, t] = (reward * shared.MASK)[:, t] + 0.5 * to_go[:, t + 1]
    same(torch.cat([b.returns for b in made]), to_go[:, :5])


def test_without_flags_it_is_openrlhfs(model):
    """Its clamp included: a log ratio of 2 k3's beyond 10 is cut at 10."""
    args = arguments(model, "--algo.kl.estimator", "k3")
    (made,) = maker(args, [torch.tensor([[-9.0]])], [torch.tensor([[-1.0]])]).make_experience([one_token()])
    same(made.kl, [[10.0]])
    assert not [name for name in made.info if name.startswith("kl/")]
    args = arguments(model, *as_flags({"estimator": "k3", "placement": "reward", "allow_vacuous": "true"}))
    (made,) = maker(args, [torch.tensor([[-9.0]])], [torch.tensor([[-1.0]])]).make_experience([one_token()])
    same(made.kl, [[torch.tensor(8.0).double().exp() - 9]])


def one_token():
    one = samples(slice(0, 1), [0.0], [0])
    one.action_mask = torch.ones(1, 1, dtype=torch.long)
    return one


def test_a_batch_without_its_kl_is_noticed(model, monkeypatch):
    from openrlhf.trainer.ppo_utils import experience_maker

    local = maker(arguments(model, *as_flags(K1)), logps(shared.LOGP), logps(shared.REF))
    stock = experience_maker.compute_approx_kl.__wrapped__
    monkeypatch.setattr(experience_maker, "compute_approx_kl", stock)
    with pytest.raises(RuntimeError, match="for the KL of 2 of 2 batches"):
        local.make_experience(batches())


def advantages(model, rewards, *flags):
    """The advantage of each of four responses to two prompts, in the order in which they were drawn."""
    args = arguments(model, "--algo.kl.use_loss", *flags)
    local = maker(args, [torch.zeros(2, 5)] * 2, [torch.zeros(2, 5)] * 2)
    index = [3, 0, 1, 2]
    shuffled = [rewards[i] for i in index]
    made = [samples(slice(0, 2), shuffled[i : i + 2], index[i : i + 2]) for i in (0, 2)]
    made = local.compute_advantages_and_returns(local.make_experience(made))
    per_response = torch.empty(4)
    per_response[torch.tensor(index)] = torch.cat([b.advantages[:, 0] for b in made])  # all of a response's are equal
    return per_response, made, local


def test_clipped_norm(model):
    """(79) by hand: groups (0.99999, 1.00001), std 1.4e-5, and (0, 4), std 2.83."""
    rewards = [0.99999, 1.00001, 0.0, 4.0]
    got, _, _ = advantages(model, rewards)
    torch.testing.assert_close(got, torch.tensor([-0.7071, 0.7071, -0.7071, 0.7071]), atol=1e-3, rtol=0)
    got, made, local = advantages(model, rewards, "--algo.advantage.std_min", "0.1", "--algo.advantage.std_max", "2")
    torch.testing.assert_close(got, torch.tensor([-1e-4, 1e-4, -1.0, 1.0]), atol=2e-6, rtol=0)
    assert (local.advantage_estimator, local.args.algo.advantage.estimator) == ("group_norm", "group_norm")
    same(torch.cat([b.rewards for b in made]), [4.0, 0.99999, 1.00001, 0.0])
    spread = torch.cat([b.info["group_reward_std"] for b in made])
    torch.testing.assert_close(spread, torch.tensor([2.8284, 1.416e-5, 1.416e-5, 2.8284]), atol=0, rtol=0.01)


def test_clipped_norm_of_equal_rewards_is_zero(model):
    got, _, _ = advantages(model, [0.3] * 4, "--algo.advantage.std_min", "0.1")
    assert got.tolist() == [0.0] * 4


def test_clipped_norm_comes_after_length_penalties(model):
    """A response of 5 tokens loses 1 to the overlong penalty, and the norm sees that."""
    flags = ["--reward.overlong_buffer_len", "1", "--rollout.max_new_tokens", "5", "--algo.advantage.std_min", "100"]
    got, made, _ = advantages(model, [1.0] * 4, *flags)
    same(torch.cat([b.rewards for b in made]), [0.0, 1.0, 0.0, 1.0])  # responses 3 and 1 are the long ones
    same(got, [0.005, -0.005, 0.005, -0.005])
