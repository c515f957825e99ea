import math

import pytest
import torch

from kl_plugins.lab import (
    TabularPolicy,
    chi2,
    gaussian,
    gaussian_chi2,
    gaussian_kl,
    gaussian_moments,
    gaussian_sample_means,
    k3_coefficient_moments,
    k3_support_bias,
    k3_variance_is_finite,
    taylor_bias,
    uniform_means,
)

Q, P = gaussian(0.1, 0.2), gaussian(0.0, 1.0)


def test_the_example_of_appendix_i():
    assert gaussian_kl(Q, P) == pytest.approx(math.log(5) + 0.05 / 2 - 0.5, abs=1e-14)
    assert round(gaussian_kl(Q, P), 4) == 1.1344
    assert not k3_variance_is_finite(Q, P)
    moments = gaussian_moments(Q, P)
    assert moments["k1"].mean == pytest.approx(gaussian_kl(Q, P), abs=1e-14)
    # log r = -log 5 - x²/2 + z²/2 with x = .1 + .2z: .48 z² - .02 z + const
    assert moments["k1"].variance == pytest.approx(2 * 0.48**2 + 0.02**2, abs=1e-14)
    assert moments["k3"].mean == pytest.approx(gaussian_kl(Q, P), abs=1e-14)
    assert moments["k3"].variance == math.inf
    assert moments["k2"].mean == pytest.approx((gaussian_kl(Q, P) ** 2 + 2 * 0.48**2 + 0.02**2) / 2, abs=1e-14)


@pytest.mark.parametrize(
    ("sigma_q", "finite"), [(0.70, False), (math.sqrt(0.5), False), (0.71, True), (1.0, True), (3.0, True)]
)
def test_variance_condition(sigma_q, finite):
    q = gaussian(0.0, sigma_q)
    assert k3_variance_is_finite(q, P) is finite
    assert math.isfinite(gaussian_moments(q, P)["k3"].variance) is finite


def test_variance_condition_in_two_dimensions_is_not_the_one_of_the_axes():
    p = gaussian([0.0, 0.0], [[1.0, 0.0], [0.0, 1.0]])
    assert k3_variance_is_finite(gaussian([0.0, 0.0], [[0.6, 0.0], [0.0, 0.6]]), p)
    # Same variances on both axes, correlated: 2Σ_q - Σ_p = [[.2, .6], [.6, .2]] has the eigenvalue -.4.
    skew = gaussian([0.0, 0.0], [[0.6, 0.3], [0.3, 0.6]])
    assert not k3_variance_is_finite(skew, p)
    assert gaussian_chi2(p, skew) == math.inf


def test_chi2_of_gaussians_by_hand():
    assert gaussian_chi2(gaussian(1.0, 2.0), gaussian(0.0, 2.0)) == pytest.approx(math.expm1(1 / 4), abs=1e-14)
    # Equal means, variances 1 and 2: σ_q²/(σ_p·√(2σ_q² - σ_p²)) = 2/√3
    assert gaussian_chi2(gaussian(0.0, 1.0), gaussian(0.0, math.sqrt(2))) == pytest.approx(2 / math.sqrt(3) - 1)
    assert gaussian_chi2(P, P) == 0


def integral(q, p, function):
    """Mean under a one-dimensional q by a fine sum, with log r handed to `function`."""
    x = torch.linspace(-25, 25, 200_001, dtype=torch.float64)
    log_q, log_p = (
        -((x - g.mean) ** 2) / (2 * g.covariance[0, 0]) - torch.log(2 * math.pi * g.covariance[0, 0]) / 2
        for g in (q, p)
    )
    return float((log_q.exp() * function(log_p - log_q)).sum() * (x[1] - x[0]))


@pytest.mark.parametrize(
    ("mean", "sigma_q", "sigma_p"), [(0.0, 1.0, 1.0), (0.7, 1.3, 1.0), (-2.0, 2.0, 1.5), (0.3, 0.9, 1.1)]
)
def test_moments_against_quadrature(mean, sigma_q, sigma_p):
    q, p = gaussian(mean, sigma_q), gaussian(0.2, sigma_p)
    estimators = {"k1": lambda r: -r, "k2": lambda r: r**2 / 2, "k3": lambda r: torch.expm1(r) - r}
    moments = gaussian_moments(q, p)
    for name, k in estimators.items():
        first = integral(q, p, k)
        second = integral(q, p, lambda r, k=k: k(r) ** 2)
        assert moments[name].mean == pytest.approx(first, rel=1e-9, abs=1e-12)
        assert moments[name].variance == pytest.approx(second - first**2, rel=1e-8, abs=1e-12)
    assert gaussian_chi2(p, q) == pytest.approx(integral(q, p, lambda r: (2 * r).exp()) - 1, rel=1e-9)


def test_moments_in_several_dimensions_add_up_over_independent_axes():
    pairs = [(gaussian(0.3, 1.2), gaussian(0.0, 1.0)), (gaussian(-1.0, 0.9), gaussian(0.5, 1.1))]
    q, p = (
        gaussian([g.mean.item() for g in side], torch.diag(torch.stack([g.covariance[0, 0] for g in side])))
        for side in zip(*pairs, strict=True)
    )
    parts = [gaussian_moments(*pair)["k1"] for pair in pairs]
    whole = gaussian_moments(q, p)
    assert whole["k1"].mean == pytest.approx(sum(m.mean for m in parts), abs=1e-13)
    assert whole["k1"].variance == pytest.approx(sum(m.variance for m in parts), abs=1e-13)
    assert 1 + gaussian_chi2(p, q) == pytest.approx(math.prod(1 + gaussian_chi2(b, a) for a, b in pairs), rel=1e-12)
    # Turning both by the same rotation changes nothing.
    turn = torch.tensor([[0.6, -0.8], [0.8, 0.6]], dtype=torch.float64)
    turned = [gaussian(turn @ g.mean, turn @ g.covariance @ turn.T) for g in (q, p)]
    for name, moment in gaussian_moments(*turned).items():
        assert moment == pytest.approx(whole[name], rel=1e-10)


def test_sample_means_follow_the_moments_where_they_exist():
    q, p = gaussian(0.3, 1.1), gaussian(0.0, 1.0)
    means, moments = gaussian_sample_means(q, p, samples=200, repeats=400, seed=1), gaussian_moments(q, p)
    for name in ("k1", "k2", "k3"):
        assert means[name].shape == (400,)
        assert float(means[name].mean()) == pytest.approx(
            moments[name].mean, abs=5 * math.sqrt(moments[name].variance / 80_000)
        )
    same = gaussian_sample_means(q, p, samples=200, repeats=400, seed=1)
    assert torch.equal(means["k3"], same["k3"])


def test_sample_means_show_the_heavy_tail():
    means = gaussian_sample_means(Q, P, samples=100, repeats=1000, seed=0)
    kl = gaussian_kl(Q, P)
    assert float((means["k1"] - kl).abs().max()) < 0.5
    # Most averages of k3 lie too low, paid for by rare huge ones.
    assert float((means["k3"] < kl).double().mean()) > 0.6
    assert float(means["k3"].max() - kl) > 4 * float(kl - means["k3"].min())


def test_gaussian_errors():
    for arguments in [([0.0, 0.0], [[1.0, 2.0], [2.0, 1.0]]), ([0.0, 0.0], [[1.0, 0.5], [0.0, 1.0]])]:
        with pytest.raises(ValueError, match="positive definite"):
            gaussian(*arguments)
    with pytest.raises(ValueError, match="does not go with"):
        gaussian([0.0, 0.0], 1.0)


def test_uniform_support():
    means = uniform_means(1, 2)
    assert means["kl"] == means["k1"] == pytest.approx(math.log(2))
    assert means["k3"] == pytest.approx(math.log(2) - 0.5, abs=1e-15)
    assert means["k2"] == pytest.approx(math.log(2) ** 2 / 2, abs=1e-15)
    assert set(uniform_means(2, 2).values()) == {0.0}
    assert set(uniform_means(2, 1).values()) == {math.inf}
    with pytest.raises(ValueError, match="widths must be positive"):
        uniform_means(0, 1)


def test_support_bias_of_a_categorical():
    q, p = (torch.tensor(x, dtype=torch.float64) for x in ([0.5, 0.5, 0.0], [0.2, 0.5, 0.3]))
    r = p[:2] / q[:2]
    kl, k3 = float(-(q[:2] * r.log()).sum()), float((q[:2] * (r - 1 - r.log())).sum())
    assert k3 - kl == pytest.approx(k3_support_bias(q, p), abs=1e-15)
    assert k3_support_bias(q, p) == pytest.approx(-0.3)
    assert k3_support_bias(p, p) == 0


def test_chi2_is_the_variance_of_the_k3_coefficient():
    pi, ref = torch.tensor([0.5, 0.25, 0.25]).double(), torch.tensor([0.25, 0.25, 0.5]).double()
    assert chi2(ref, pi) == pytest.approx(0.25**2 / 0.5 + 0.25**2 / 0.25)
    for seed in range(5):
        pi, ref = (TabularPolicy.random(6, 1, s).response_probabilities() for s in (seed, seed + 50))
        mean, variance = k3_coefficient_moments(pi, ref)
        assert mean == pytest.approx(0, abs=1e-14)
        assert variance == pytest.approx(chi2(ref, pi), rel=1e-12)
    assert chi2(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])) == math.inf
    # Without π_ref ≪ π, the mean of 1 - δ is the mass out of reach.
    assert k3_coefficient_moments(torch.tensor([1.0, 0.0]), torch.tensor([0.7, 0.3])).mean == pytest.approx(0.3)


def test_taylor_bias():
    delta = torch.tensor([0.01, 0.5, 0.9, 1.0, 1.1, 2.0, 100.0], dtype=torch.float64)
    exact = taylor_bias(delta)
    torch.testing.assert_close(exact, -delta.log() - (1 - delta), rtol=1e-12, atol=1e-15)
    assert exact[3] == 0
    assert bool((exact[[0, 1, 2, 4, 5, 6]] > 0).all())  # 1 - δ ≤ -log δ, equal only at 1
    assert float(taylor_bias(1.1, order=3)) == pytest.approx(0.1**2 / 2 - 0.1**3 / 3, abs=1e-15)
    assert float(taylor_bias(0.9, order=60)) == pytest.approx(float(taylor_bias(0.9)), abs=1e-15)
    assert float(taylor_bias(1 + 1e-9)) == pytest.approx(0.5e-18, rel=1e-6)
    # The tails: the k3 coefficient saturates at 1 where k2's keeps growing, and explodes where k2's grows as a log.
    assert float(taylor_bias(math.exp(-10))) == pytest.approx(9 + math.exp(-10))
    assert float(taylor_bias(math.exp(10))) == pytest.approx(math.exp(10) - 11)
    with pytest.raises(ValueError, match="must be positive"):
        taylor_bias(0.0)
