"""Small autoregressive policies held as a table of logits, in float64, so that every response can be enumerated.

With a vocabulary of V tokens and responses of T tokens there are V^T responses (N below) and one state for each
prefix shorter than T: S = 1 + V + ... + V^(T-1). States are numbered by prefix length, then by the prefix read as a
number in base V, so state 0 is the empty prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_RESPONSES = 2**20


class TabularPolicy(torch.nn.Module):
    """One row of logits [V] for each of the S prefix states; `logits` [S, V] is the only parameter.

    Args:
        logits: [S, V] finite numbers, or [V] for responses of one token. Copied to float64.

    Raises:
        ValueError: S is not 1 + V + ... + V^(T-1) for any T, a logit is not finite, or V^T is too large to enumerate.
    """

    def __init__(self, logits: Tensor | Sequence) -> None:
        super().__init__()
        table = torch.as_tensor(logits, dtype=torch.float64).detach().clone()
        table = table[None] if table.ndim == 1 else table
        if table.ndim != 2 or table.numel() == 0:
            raise ValueError(f"logits must be [S, V] or [V], got shape {tuple(table.shape)}")
        if not bool(table.isfinite().all()):
            raise ValueError("logits must be finite; for a tiny probability use a large negative number")
        self.vocabulary = table.shape[1]
        self.length, states = 0, 0
        while states < table.shape[0]:
            states += self.vocabulary**self.length
            self.length += 1
        if states != table.shape[0]:
            raise ValueError(
                f"{table.shape[0]} states do not fit a vocabulary of {self.vocabulary}: a response of T tokens needs "
                f"1 + V + ... + V^(T-1) of them, the nearest is {states}"
            )
        if self.vocabulary**self.length > MAX_RESPONSES:
            raise ValueError(
                f"{self.vocabulary}^{self.length} responses are too many to enumerate (limit {MAX_RESPONSES}): "
                "take a smaller vocabulary or fewer tokens"
            )
        self.logits = torch.nn.Parameter(table)

    @classmethod
    def random(cls, vocabulary: int, length: int, seed: int = 0, scale: float = 1.0) -> TabularPolicy:
        """Logits drawn from N(0, scale²), the same for the same seed."""
        if vocabulary < 1 or length < 1:
            raise ValueError(f"vocabulary and length must be at least 1, got {vocabulary} and {length}")
        if vocabulary**length > MAX_RESPONSES:
            raise ValueError(f"{vocabulary}^{length} responses are too many to enumerate (limit {MAX_RESPONSES})")
        states = sum(vocabulary**t for t in range(length))
        return cls(scale * _normal((states, vocabulary), seed))

    @classmethod
    def from_probabilities(cls, probabilities: Tensor | Sequence) -> TabularPolicy:
        """The softmax policy whose next-token probabilities are the rows of `probabilities` [S, V] or [V]."""
        table = torch.as_tensor(probabilities, dtype=torch.float64)
        if not bool((table > 0).all()):
            raise ValueError("a softmax policy gives every token a positive probability; got one that is not")
        sums = table.sum(-1)
        if not torch.allclose(sums, torch.ones_like(sums)):
            raise ValueError(f"every row of probabilities must sum to 1, got {sums.tolist()}")
        return cls(table.log())

    def near(self, scale: float, seed: int = 0) -> TabularPolicy:
        """A copy with N(0, scale²) added to every logit: a policy some updates away from this one."""
        return TabularPolicy(self.logits.detach() + scale * _normal(self.logits.shape, seed))

    def responses(self) -> Tensor:
        """All responses, [N, T] token numbers, the first token slowest."""
        tokens = torch.arange(self.vocabulary)
        return torch.cartesian_prod(*[tokens] * self.length).reshape(-1, self.length)

    def states(self, responses: Tensor) -> Tensor:
        """The state each token was chosen in, [N, T], for `responses` [N, T]."""
        columns, offset, prefix = [], 0, torch.zeros_like(responses[:, 0])
        for t in range(self.length):
            columns.append(offset + prefix)
            offset += self.vocabulary**t
            prefix = prefix * self.vocabulary + responses[:, t]
        return torch.stack(columns, dim=1)

    def logp(self, responses: Tensor) -> Tensor:
        """Log-probability log π(y_t | y_<t) in nats, [N, T], with gradient to `logits`, for `responses` [N, T]."""
        if responses.ndim != 2 or responses.shape[1] != self.length:
            raise ValueError(f"responses must be [N, {self.length}], got {tuple(responses.shape)}")
        return self.logits.log_softmax(-1)[self.states(responses), responses]

    @torch.no_grad()
    def response_probabilities(self) -> Tensor:
        """π(y) of every response, [N], in the order of `responses()`."""
        return self.logp(self.responses()).sum(-1).exp()

    @torch.no_grad()
    def state_probabilities(self) -> Tensor:
        """Probability that a response passes through each state, [S]; they sum to T."""
        visits = self.response_probabilities()[:, None].expand(-1, self.length)
        out = torch.zeros(self.logits.shape[0], dtype=torch.float64)
        return out.index_add_(0, self.states(self.responses()).flatten(), visits.flatten())

    @torch.no_grad()
    def sample(self, count: int, seed: int = 0) -> Tensor:
        """`count` responses drawn from the policy, [count, T]."""
        generator = torch.Generator().manual_seed(seed)
        index = torch.multinomial(self.response_probabilities(), count, replacement=True, generator=generator)
        return self.responses()[index]


def _normal(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), dtype=torch.float64, generator=generator)
