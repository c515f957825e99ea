"""Estimators as estimates of a value: bias, variance and where they have none.

Appendix I, (62) and (63) of arXiv 2510.01555 (https://arxiv.org/abs/2510.01555), with r = p/q, samples from q and the
quantity wanted KL(q‖p): k1 = -log r, k2 = (log r)²/2, k3 = r - 1 - log r. Means of a Gaussian are numbers or [D],
spreads are standard deviations (a number) or covariance matrices [D, D]. Everything is float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Mean and variance of one sample of an estimator; the variance may be infinite."""

    mean: float
    variance: float


class Gaussian(NamedTuple):
    """N(mean, covariance): `mean` [D], `covariance` [D, D], float64."""

    mean: Tensor
    covariance: Tensor


def gaussian(mean: float | list | Tensor, spread: float | list | Tensor) -> Gaussian:
    """A Gaussian from a mean and a standard deviation (numbers), or a mean [D] and a covariance [D, D].

    Raises:
        ValueError: shapes disagree, or the covariance is not symmetric and positive definite.
    """
    mean = torch.as_tensor(mean, dtype=torch.float64)
    spread = torch.as_tensor(spread, dtype=torch.float64)
    if mean.ndim == 0 and spread.ndim == 0:
        mean, spread = mean[None], (spread**2)[None, None]
    if mean.ndim != 1 or spread.shape != (mean.shape[0], mean.shape[0]):
        raise ValueError(f"a mean {tuple(mean.shape)} does not go with a spread {tuple(spread.shape)}")
    if not torch.allclose(spread, spread.T) or not _positive_definite(spread):
        raise ValueError(f"covariance must be symmetric and positive definite, got {spread.tolist()}")
    return Gaussian(mean, spread)


def _positive_definite(matrix: Tensor, rounding: float = 0.0) -> bool:
    return bool(torch.linalg.eigvalsh(matrix).min() > rounding)


def gaussian_kl(q: Gaussian, p: Gaussian) -> float:
    """KL(q‖p) in nats."""
    inverse, shift = torch.linalg.inv(p.covariance), p.mean - q.mean
    quadratic = torch.trace(inverse @ q.covariance) + shift @ inverse @ shift - len(shift)
    return float(quadratic + torch.logdet(p.covariance) - torch.logdet(q.covariance)) / 2


def k3_variance_is_finite(q: Gaussian, p: Gaussian) -> bool:
    """Appendix I: k3 has a variance under q exactly when 2Σ_q - Σ_p is positive definite (σ_q² > σ_p²/2 in 1-D)."""
    rounding = 1e-14 * float(p.covariance.norm())  # on the boundary itself the variance is infinite
    return _positive_definite(2 * q.covariance - p.covariance, rounding)


def gaussian_chi2(p: Gaussian, q: Gaussian) -> float:
    """χ²(p‖q) = E_q[r²] - 1, infinite unless 2Σ_q - Σ_p is positive definite."""
    if not k3_variance_is_finite(q, p):
        return math.inf
    spread, shift = 2 * q.covariance - p.covariance, p.mean - q.mean
    log_scale = torch.logdet(q.covariance) - (torch.logdet(p.covariance) + torch.logdet(spread)) / 2
    return math.expm1(float(log_scale + shift @ torch.linalg.inv(spread) @ shift))


def gaussian_moments(q: Gaussian, p: Gaussian) -> dict[str, Moments]:
    """Mean and variance of k1, k2 and k3 under q, in closed form; only k3's variance can be infinite.

    log r is a quadratic in a standard normal z, so its cumulants are known; E_q[r log r] = KL(p‖q).
    """
    root = torch.linalg.cholesky(q.covariance)
    inverse, shift = torch.linalg.inv(p.covariance), q.mean - p.mean
    curve = torch.eye(len(shift), dtype=torch.float64) - root.T @ inverse @ root
    slope = -(root.T @ inverse @ shift)
    mean = -gaussian_kl(q, p)
    second, third, fourth = (
        math.factorial(n - 1) / 2 * float(torch.trace(torch.linalg.matrix_power(curve, n)))
        + math.factorial(n) / 2 * float(slope @ torch.linalg.matrix_power(curve, n - 2) @ slope)
        for n in (2, 3, 4)
    )
    square_variance = fourth + 4 * mean * third + 2 * second**2 + 4 * mean**2 * second
    k3_variance = gaussian_chi2(p, q) + second - 2 * (gaussian_kl(p, q) - mean)
    return {
        "k1": Moments(-mean, second),
        "k2": Moments((second + mean**2) / 2, square_variance / 4),
        "k3": Moments(-mean, k3_variance),
    }


def gaussian_sample_means(q: Gaussian, p: Gaussian, samples: int, repeats: int, seed: int = 0) -> dict[str, Tensor]:
    """What one would report: `repeats` averages over `samples` draws from q of k1, k2 and k3, [repeats] each."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(repeats, samples, len(q.mean), dtype=torch.float64, generator=generator)
    draws = q.mean + noise @ torch.linalg.cholesky(q.covariance).T
    log_r = _log_density(p, draws) - _log_density(q, draws)
    values = {"k1": -log_r, "k2": log_r**2 / 2, "k3": torch.expm1(log_r) - log_r}
    return {name: value.mean(-1) for name, value in values.items()}


def _log_density(g: Gaussian, points: Tensor) -> Tensor:
    return torch.distributions.MultivariateNormal(g.mean, g.covariance).log_prob(points)


def uniform_means(q_width: float, p_width: float) -> dict[str, float]:
    """E_q of the estimators and the true `kl`, for q uniform on [0, q_width] and p on [0, p_width].

    k3 misses the truth by p's mass outside q (appendix I): it needs p ≪ q. Where q reaches outside p all are infinite.
    """
    if q_width <= 0 or p_width <= 0:
        raise ValueError(f"widths must be positive, got {q_width} and {p_width}")
    if q_width > p_width:
        return dict.fromkeys(("kl", "k1", "k2", "k3"), math.inf)
    ratio = q_width / p_width
    kl = -math.log(ratio)
    return {"kl": kl, "k1": kl, "k2": kl**2 / 2, "k3": ratio - 1 + kl}


def k3_support_bias(q: Tensor, p: Tensor) -> float:
    """E_q[k3] - KL(q‖p) for probabilities q and p [V]: minus the mass that p puts where q has none."""
    return -float(p[q == 0].sum())


def chi2(p: Tensor, q: Tensor) -> float:
    """χ²(p‖q) = Σ p²/q - 1 for probabilities [V]; infinite where p has mass and q none."""
    if bool(((q == 0) & (p > 0)).any()):
        return math.inf
    inside = q > 0
    return float(((p[inside] - q[inside]) ** 2 / q[inside]).sum())


def k3_coefficient_moments(policy: Tensor, reference: Tensor) -> Moments:
    """Mean and variance of 1 - δ under π, for probabilities [V]: 0 and χ²(π_ref‖π), by (63), if π_ref ≪ π."""
    inside = policy > 0
    weight = policy[inside]
    coefficient = 1 - reference[inside] / weight
    mean = float((weight * coefficient).sum())
    return Moments(mean, float((weight * (coefficient - mean) ** 2).sum()))


def taylor_bias(delta: Tensor | float, order: int | None = None) -> Tensor:
    """What the k3 coefficient 1 - δ lacks of k2's -logδ (62), elementwise; never negative, 0 only at δ = 1.

    Args:
        delta: δ = π_ref/π_θ > 0.
        order: None for -logδ - (1 - δ) itself; n for its series ½(δ-1)² - ⅓(δ-1)³ + … up to the power n.
    """
    delta = torch.as_tensor(delta, dtype=torch.float64)
    if not bool((delta > 0).all()):
        raise ValueError("delta is a ratio of probabilities and must be positive")
    step = delta - 1
    if order is None:
        return step - torch.log1p(step)
    return sum(((-1) ** n * step**n / n for n in range(2, order + 1)), torch.zeros_like(step))
