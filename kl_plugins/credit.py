"""Credit: which tokens' penalties one token is blamed for.

grad KL(pi || pi_ref) over responses = E[sum_t (sum_{s>=t} log_ratio_s) grad logp_t]; ``token`` credit drops the future.
Shapes: ``[B, T]``; see math of https://arxiv.org/abs/2510.01555 for the bandit form that ``sequence`` restates.
"""

from __future__ import annotations

import torch
from torch import Tensor


def assign_credit(coefficient: Tensor, mask: Tensor, credit: str) -> Tensor:
    """C from c, ``[B, T]``: 0 at masked tokens, which neither give nor take blame.

    ``token``: C_t = c_t. ``return``: C_t = sum of c_s over unmasked s >= t. ``sequence``: the sum over all unmasked s.
    """
    c = torch.where(mask, coefficient, 0.0)
    if credit == "return":
        c = c.flip(-1).cumsum(-1).flip(-1)
    elif credit == "sequence":
        c = c.sum(-1, keepdim=True).expand_as(c)
    return torch.where(mask, c, 0.0)
