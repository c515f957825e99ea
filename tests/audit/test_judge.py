"""The measurements, on losses whose answers are known by hand. Numbers of math.md 3 and cases.md 9 to 15."""

import math

import pytest
import torch

from kl_plugins import KLConfig
from kl_plugins.audit import judge
from kl_plugins.lab import TabularPolicy, gradient_moments, loss_coefficients

CLIP = (0.2, 0.2)


def row(*values):
    return torch.tensor([values], dtype=torch.float64)


def gradient(loss, logp, ref_logp, old_logp=None):
    logp = logp.clone().requires_grad_(True)
    total = loss(logp, ref_logp, logp.detach() if old_logp is None else old_logp).sum()
    return torch.autograd.grad(total, logp)[0]


def plugin(estimator="k2", **axes):
    return judge.plugin_loss(KLConfig(estimator, allow_vacuous=True, **axes))


@pytest.mark.parametrize(
    ("loss", "objective"),
    [
        (plugin("k1"), "nothing"),
        (plugin("none"), "nothing"),
        (plugin("k2"), "reverse"),
        (plugin("k3"), "forward"),
        (plugin("mse"), "mse"),
        (plugin("k2", form="combined"), "reverse"),
        (plugin("k2", coefficient_bound=0.5), "other"),
        (plugin("k1", placement="reward"), "reverse"),
        (plugin("k3", placement="reward"), "other"),
        (lambda logp, ref, old: (logp - ref).abs(), "other"),
        (lambda logp, ref, old: (logp - ref).detach(), "nothing"),
        (lambda logp, ref, old: (logp - ref).float() ** 2 / 2, "reverse"),  # float32, as OpenRLHF casts
        (lambda logp, ref, old: -((logp - ref) ** 2) / 2, "other"),  # the penalty maximised
    ],
)
def test_descends(loss, objective):
    assert judge.descends(loss) == objective


def test_categorical_example():
    """Case 9: only k2 descends reverse KL."""
    policy, reference = (TabularPolicy.from_probabilities(p) for p in ([0.7, 0.2, 0.1], [0.5, 0.3, 0.2]))
    for estimator, expected in (
        ("k1", [0, 0, 0]),
        ("k2", [0.175945, -0.098118, -0.077827]),
        ("k3", [0.2, -0.1, -0.1]),
    ):
        coefficients = loss_coefficients(plugin(estimator), policy, reference)
        mean, _ = gradient_moments(coefficients, policy)
        assert mean.tolist() == pytest.approx(expected, abs=1e-6)


def test_ratio_level():
    """Case 11: the token ratio weighs token terms; the sequence ratio gives another mean."""
    logp, old, ref = row(-1, -2), row(-1.5, -1.9), row(-1.2, -2.4)
    for ratio, mean in (("token", 0.0472550), ("sequence", 0.0664)):
        value = plugin("k3", correction="is", ratio=ratio)(logp, ref, old)
        assert value.mean().item() == pytest.approx(mean, abs=1e-4 if ratio == "sequence" else 1e-7)


def test_clip_on_the_head():
    """Case 12."""
    loss = plugin("k2", correction="clip")
    logp, ref = row(-1, -2), row(-1.2, -2.4)
    assert gradient(loss, logp, ref, row(-1.5, -1.9))[0].tolist() == pytest.approx([0.329744, 0.361935], abs=1e-6)
    assert gradient(loss, logp, ref, row(-0.5, -1.9))[0, 0] == 0


def test_one_token_of_the_head():
    """Cases 13 to 15: not detached, the value of another estimator, a ratio of 1."""
    logp, ref = row(-1), row(-2)
    assert gradient(plugin("k2"), logp, ref).item() == 1
    both = plugin("k2", report="k3")
    assert both(logp, ref, logp).item() == pytest.approx(0.3678794, abs=1e-7)
    assert gradient(both, logp, ref).item() == 1
    assert gradient(plugin("k3"), logp, ref).item() == pytest.approx(0.6321206, abs=1e-7)
    assert gradient(plugin("k2", correction="clip"), logp, ref, logp).item() == 1


def test_policy_loss_is_ppos():
    logp, old = row(math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5), 0), row(0, 0, 0, 0, 0)
    advantages = row(1, -1, 1, -1, 2)
    losses = judge.policy_loss(advantages, logp, old, CLIP)
    assert losses[0].tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8, -2])


def test_a_reward_holds_the_old_policys_penalty():
    """The reward was computed when the batch was written; one token, ratio 1.1, k1 of the old policy 0.5."""
    loss = judge.reward_loss(lambda logp, ref: logp - ref, "return", CLIP)
    logp, old, ref = row(-1.0), row(-1 - math.log(1.1)), row(-1.5 - math.log(1.1))
    assert gradient(loss, logp, ref, old).item() == pytest.approx(1.1 * 0.5)


def test_reward_credit():
    value = torch.sub
    logp, ref = row(-1, -1, -1), row(-1.5, -1.25, -1)
    returns = gradient(judge.reward_loss(value, "return", CLIP), logp, ref)
    whole = gradient(judge.reward_loss(value, "sequence", CLIP), logp, ref)
    assert returns[0].tolist() == pytest.approx([0.75, 0.25, 0])
    assert whole[0].tolist() == pytest.approx([0.75, 0.75, 0.75])


def test_dead_zones():
    def clamped(low, high):
        return lambda logp, ref, old: ((logp - ref) ** 2 / 2).clamp(min=low, max=high)

    assert judge.dead_zones(plugin("k2")) == []
    assert judge.dead_zones(plugin("k3")) == []
    assert judge.dead_zones(plugin("none")) == []  # no gradient anywhere is another finding
    (left, right) = judge.dead_zones(clamped(0, 8))
    assert left == (-math.inf, pytest.approx(-4, abs=1e-5))
    assert right == (pytest.approx(4, abs=1e-5), math.inf)
    (middle,) = judge.dead_zones(clamped(0.5, 1e9))
    assert middle == (pytest.approx(-1, abs=1e-5), pytest.approx(1, abs=1e-5))


def test_importance_weight():
    assert not judge.weighted(plugin("k2"))
    assert judge.weighted(plugin("k2", correction="is"))
    assert judge.weighted(plugin("k2", correction="clip"))
    assert not judge.weighted(lambda logp, ref, old: (logp - old).exp().clamp(max=1.2).detach() * (logp - ref) ** 2 / 2)


def test_off_policy_exactness():
    """The token ratio is exact for one token, the sequence ratio with return credit for three; nothing less is."""
    plain, weighted = judge.measure(plugin("k2"), True), judge.measure(plugin("k2", correction="is"), True)
    exact = judge.measure(plugin("k2", correction="is", ratio="sequence", credit="return", ratio_cap=1e9), True)
    assert plain.reverse_error.median > 0.05
    assert plain.drift.median > 0.05
    assert weighted.reverse_error.high < 1e-9
    assert weighted.drift.high < 1e-9
    assert weighted.response_error.median > 0.05
    assert exact.response_error.high < 1e-9


def test_on_policy_rows():
    k2, k3, k1 = (judge.measure(plugin(name), False) for name in ("k2", "k3", "k1"))
    assert k2.reverse_error.high < 1e-9 < k2.forward_error.low
    assert k3.forward_error.high < 1e-9 < k3.reverse_error.low
    assert k1.noise.low == math.inf
    assert k1.reverse_cosine.high == 0
    assert k2.response_error.median > 0.05  # token credit
    returns = judge.measure(plugin("k2", credit="return"), False)
    assert returns.response_error.high < 1e-9
    assert returns.response_noise.median > k2.response_noise.median
    assert judge.measure(plugin("k1", placement="reward"), False) == returns  # (13) and (14) under return credit


def test_combined_form_lets_go_where_the_clip_acts():
    """Section 3 of math.md: ratio 1.5, clip 0.2, A = 1, beta c = 0.5."""
    combined, decoupled = judge.pull_when_clipped(KLConfig("k2", form="combined"), CLIP)
    assert combined == 0
    assert decoupled == pytest.approx(0.75)


def test_pushes_away():
    assert not judge.pushes_away(plugin("k1", placement="reward"))
    assert judge.pushes_away(plugin("k3", placement="reward"))
    assert judge.pushes_away(plugin("k2", placement="reward"))
    assert not judge.pushes_away(plugin("k3"))
