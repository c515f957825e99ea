"""What a run should log about its KL regulariser, per micro-batch.

Shapes: ``[B, T]`` in, plain floats out (one device-to-host copy of a dozen scalars).
Equation numbers: https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kl_plugins.config import KLConfig
from kl_plugins.estimators import get_estimator
from kl_plugins.head import Batch, HeadTerms, check_batch, make_head


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
    batch = check_batch(
        logp.detach(), ref_logp, mask=mask, config=config, old_logp=old_logp, rollout_weights=rollout_weights
    )
    return head_and_metrics(batch, config)[1]


def head_and_metrics(batch: Batch, config: KLConfig) -> tuple[Tensor, dict[str, float]]:
    """:func:`kl_plugins.kl_head`'s matrix and :func:`kl_metrics` from the same terms."""
    matrix, parts = make_head(batch, config, _statistics)
    parts = torch.stack(parts)
    sums, (coef_max, rho_max) = parts[:, :-2].sum(0).tolist(), parts[:, -2:].amax(0).tolist()
    count, k1, k2, k3, chi2, up, down, coef, pull, kept, log_rho, rho, rho2 = sums
    count = count or 1.0
    return matrix, {
        "sampled": (k1 - log_rho) / count,
        "k1": k1 / count,
        "k2": k2 / count,
        "k3": k3 / count,
        "tail_up": up / count,
        "tail_down": down / count,
        "coef_mean": coef / count,
        "coef_max": coef_max,
        "clip_removed": (pull - kept) / pull if pull else 0.0,
        "ess": rho * rho / (count * rho2) if rho2 else 0.0,
        "rho_max": rho_max,
        "chi2": chi2 / count,
    }


@torch.no_grad()
def _statistics(terms: HeadTerms) -> Tensor:
    """What adds up over rows, and two largest values last."""
    r, size = terms.log_ratio, terms.coefficient.abs()
    k3, k3_coefficient = get_estimator("k3").pair(r)
    count = terms.mask.sum()
    zero = torch.zeros_like(count)
    pull = kept = zero
    if terms.gradient is not terms.pull:
        pull, kept = terms.pull.abs().sum(), terms.gradient.abs().sum()
    rho = terms.mask.to(r.dtype) if terms.ratio is None else terms.ratio
    return torch.stack(
        [
            count,
            r.sum(),
            get_estimator("k2").pair(r)[0].sum(),
            k3.sum(),
            k3_coefficient.square_().sum(),
            r.clone().gt_(2).sum(),
            r.clone().lt_(-2).sum(),
            size.sum(),
            pull,
            kept,
            zero if terms.log_rho is None else terms.log_rho.sum(),
            rho.sum(),
            rho.square().sum(),
            _largest(size),
            _largest(rho),
        ]
    )


def _largest(x: Tensor) -> Tensor:
    return x.max() if x.numel() else x.sum()
