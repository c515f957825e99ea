"""What a run should log about its KL regulariser, per micro-batch.

Shapes: ``[B, T]`` in, plain floats out (one device-to-host copy of a dozen scalars).
Equation numbers: https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_plugins.config import KLConfig
from kl_plugins.estimators import get_estimator
from kl_plugins.head import HeadTerms, head_terms


def kl_metrics(
    logp: Tensor,
    ref_logp: Tensor,
    *,
    mask: Tensor,
    old_logp: Tensor | None = None,
    config: KLConfig | None = None,
    rollout_weights: Tensor | None = None,
) -> dict[str, float]:
    """Scalars over the unmasked tokens; all 0 when there are none.

    - ``sampled``: mean k1 of ``old_logp`` (of ``logp`` without it), nats a token: the unbiased estimate of
      KL(pi_old || pi_ref) on the policy's own samples. Not about 0 at step 1: policy and reference differ in weights,
      temperature or precision.
    - ``k1``, ``k2``, ``k3``: means of the values of ``logp``, nats a token, over the batch as it was sampled.
    - ``tail_up``, ``tail_down``: shares of tokens with pi_theta / pi_ref > e^2 and < e^-2.
    - ``coef_mean``, ``coef_max``: mean and largest |C|, the configured coefficient after bound and credit.
    - ``clip_removed``: share of the KL gradient, sum |w C|, that clipping removed (70); 0 without clip.
    - ``ess``, ``rho_max``: effective sample size of rho as a share of the tokens, (sum rho)^2 / (n sum rho^2), and the
      largest rho before its cap; both 1 when ``old_logp`` is not given.
    - ``chi2``: mean (1 - pi_ref / pi_theta)^2, an estimate of chi^2(pi_ref || pi_theta), the variance of k3's
      coefficient (63).

    Raises:
        ValueError: as :func:`kl_plugins.kl_head`.
    """
    config = config or KLConfig()
    return measure(
        head_terms(logp, ref_logp, mask=mask, config=config, old_logp=old_logp, rollout_weights=rollout_weights)
    )


@torch.no_grad()
def measure(terms: HeadTerms) -> dict[str, float]:
    """:func:`kl_metrics` of terms that are there already, the head's."""
    r, size, count = terms.log_ratio, terms.coefficient.abs(), terms.mask.sum()
    k3, k3_coefficient = get_estimator("k3").pair(r)
    flags = torch.empty_like(r)  # 0/1 as floats, which a CPU writes and sums four times as fast as bools
    sums = {
        "count": count,
        "k1": r.sum(),
        "k2": get_estimator("k2").pair(r)[0].sum(),
        "k3": k3.sum(),
        "tail_up": torch.gt(r, 2, out=flags).sum(),
        "tail_down": torch.lt(r, -2, out=flags).sum(),
        "coef_mean": size.sum(),
        "coef_max": _largest(size),
        "chi2": torch.dot(k3_coefficient.flatten(), k3_coefficient.flatten()),
        "pull": size.sum() if terms.pull is terms.coefficient else terms.pull.abs().sum(),
        "log_rho": torch.zeros_like(count) if terms.log_rho is None else terms.log_rho.sum(),
    }
    if terms.ratio is None:
        sums |= {"rho": count, "rho_squared": count, "rho_max": count.clamp(max=1)}
    else:
        rho = terms.ratio
        sums |= {"rho": rho.sum(), "rho_squared": rho.square().sum(), "rho_max": _largest(rho)}
    sums["kept"] = sums["pull"] if terms.gradient is terms.pull else terms.gradient.abs().sum()
    x = dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
    n = max(x["count"], 1)
    return {
        "sampled": (x["k1"] - x["log_rho"]) / n,
        **{name: x[name] / n for name in ("k1", "k2", "k3", "tail_up", "tail_down", "coef_mean")},
        "coef_max": x["coef_max"],
        "clip_removed": (x["pull"] - x["kept"]) / (x["pull"] or 1),
        "ess": x["rho"] ** 2 / (n * x["rho_squared"] or 1),
        "rho_max": x["rho_max"],
        "chi2": x["chi2"] / n,
    }


def _largest(x: Tensor) -> Tensor:
    return x.max() if x.numel() else x.sum()
