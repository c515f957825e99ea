"""Credit: which tokens' penalties one token is blamed for.

grad KL(pi || pi_ref) over responses = E[sum_t (sum_{s>=t} log_ratio_s) grad logp_t]; ``token`` credit drops the future.
Shapes: ``[B, T]``; see math of https://arxiv.org/abs/2510.01555 for the bandit form that ``sequence`` restates.
"""

from __future__ import annotations

from torch import Tensor

from kl_plugins.estimators import select


def assign_credit(coefficient: Tensor, mask: Tensor, credit: str) -> Tensor:
    """C from c, ``[B, T]``, both 0 at masked tokens, which neither give nor take blame; ``mask`` is `select`'s.

    ``token``: C_t = c_t. ``return``: C_t = sum of c_s over unmasked s >= t. ``sequence``: the sum over all unmasked s.
    """
    if credit == "return":
        return select(coefficient.flip(-1).cumsum(-1).flip(-1), mask)
    if credit == "sequence":
        return select(coefficient.sum(-1, keepdim=True).expand_as(coefficient).clone(), mask)
    return coefficient
