"""What a run should log about its KL regulariser, per micro-batch.

Shapes: ``[B, T]`` in, plain floats out (one device-to-host copy of a dozen scalars).
Equation numbers: https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_plugins.config import KLConfig
from kl_plugins.estimators import get_estimator, log_ratio
from kl_plugins.head import head_terms
from kl_plugins.ratios import importance_ratio


@torch.no_grad()
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
    terms = head_terms(logp, ref_logp, mask=mask, config=config, old_logp=old_logp, rollout_weights=rollout_weights)
    mask = mask != 0
    logp, ref_logp = torch.where(mask, logp.detach(), 0), torch.where(mask, ref_logp.detach(), 0)
    old_logp = logp if old_logp is None else torch.where(mask, old_logp.detach(), 0)
    ratio = importance_ratio(logp, old_logp, mask, level=config.ratio)
    count = mask.sum().clamp(min=1)

    def mean(x: Tensor) -> Tensor:
        return torch.where(mask, x, 0.0).sum() / count

    def largest(x: Tensor) -> Tensor:
        x = torch.where(mask, x, 0.0)
        return x.max() if x.numel() else x.sum()

    r = log_ratio(logp, ref_logp)
    size = terms.coefficient.abs()
    pull = terms.weight * size
    rho = torch.where(mask, ratio, 0.0)
    scalars = {
        "sampled": mean(log_ratio(old_logp, ref_logp)),
        **{name: mean(get_estimator(name).value(logp, ref_logp)) for name in ("k1", "k2", "k3")},
        "tail_up": mean((r > 2).to(r.dtype)),
        "tail_down": mean((r < -2).to(r.dtype)),
        "coef_mean": mean(size),
        "coef_max": largest(size),
        "clip_removed": mean(torch.where(terms.active, 0.0, pull)) / _nonzero(mean(pull)),
        "ess": rho.sum().square() / _nonzero(count * rho.square().sum()),
        "rho_max": largest(ratio),
        "chi2": mean(get_estimator("k3").coefficient(logp, ref_logp).square()),
    }
    return dict(zip(scalars, torch.stack(list(scalars.values())).tolist(), strict=True))


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1.0, x)
