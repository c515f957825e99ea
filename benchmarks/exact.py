"""Exact KL from hidden states beside its floor, its sampled and naive alternatives, and Liger-Kernel's fused GRPO loss.

N = 2048 positions, H = 512, V = 32000, float32. Every variant ends with gradients of hidden states and head.
``python -m benchmarks.exact --peak NAME`` prints the peak memory of one, in bytes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import Result, in_turn, peak_in_a_process, peak_of, release
from kl_plugins.exact import kl_from_hidden

POSITIONS, HIDDEN, VOCABULARY = 2048, 512, 32000
SEQUENCES = 4  # Liger takes whole sequences
SAMPLED_CHUNKS = (256, 512)  # of 128 to 1024, the fastest two
FLOOR = "the four matrix products"


class Problem:
    """The inputs, and one method a variant; each but the floor leaves gradients in ``leaves``."""

    def __init__(self, positions: int = POSITIONS, hidden: int = HIDDEN, vocabulary: int = VOCABULARY):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=generator)

        self.hidden, self.weight = draw(positions, hidden), draw(vocabulary, hidden) / hidden**0.5
        self.ref_hidden = self.hidden + 0.05 * draw(positions, hidden)
        self.ref_weight = self.weight + 0.005 * draw(vocabulary, hidden) / hidden**0.5
        self.labels = torch.randint(vocabulary, (positions,), generator=generator)
        self.advantages = draw(SEQUENCES)
        self.leaves = [self.hidden.requires_grad_(), self.weight.requires_grad_()]
        self.out: list[Tensor] = []

    def variants(self) -> dict[str, Callable[[], None]]:
        known = {
            FLOOR: self.products,
            "kl_from_hidden": self.exact,
            "kl_from_hidden, chunk=128": partial(self.exact, chunk=128),
            "kl_from_hidden, policy loss in the same pass": self.exact_with_policy,
            "kl_from_hidden, forward": partial(self.exact, direction="forward"),
            **{
                f"sampled k2, torch, checkpointed chunks of {rows}": partial(self.sampled, rows)
                for rows in SAMPLED_CHUNKS
            },
            "exact, torch, naive autograd": self.naive,
        }
        if importlib.util.find_spec("liger_kernel"):
            known[f"fused linear GRPO with k3, {release('liger-kernel')}"] = self.liger
        return known

    @torch.no_grad()
    def products(self) -> None:
        """What cannot be avoided: logits of both models, gradients of hidden states and head, nothing between."""
        if not self.out:  # the outputs stay, so that no page is faulted in while it is timed
            shape = (len(self.hidden), len(self.weight))
            self.out = [torch.empty(shape), torch.empty(shape), *(torch.empty_like(x) for x in self.leaves)]
        logits, ref_logits, grad_hidden, grad_weight = self.out
        torch.mm(self.hidden, self.weight.T, out=logits)
        torch.mm(self.ref_hidden, self.ref_weight.T, out=ref_logits)
        torch.mm(logits, self.weight, out=grad_hidden)
        torch.mm(logits.T, self.hidden, out=grad_weight)

    def exact(self, **settings) -> None:
        weights = torch.full((len(self.hidden),), 1 / len(self.hidden))
        inputs = self.hidden, self.weight, self.ref_hidden, self.ref_weight
        out = kl_from_hidden(*inputs, labels=self.labels, token_weights=weights, **settings)
        self._backward(out.loss)

    def exact_with_policy(self) -> None:
        scale = self.advantages.repeat_interleave(len(self.hidden) // SEQUENCES) / len(self.hidden)
        self.exact(token_loss=lambda logp, positions: -scale[positions] * (logp - logp.detach()).exp())

    def sampled(self, chunk: int) -> None:
        """Log-probabilities of the drawn tokens by chunks, the policy's made again in backward."""
        loss = 0.0
        for rows in torch.arange(len(self.hidden)).split(chunk):
            rows = slice(rows[0], rows[-1] + 1)
            with torch.no_grad():
                ref_logp = _logp(self.ref_hidden[rows], self.ref_weight, self.labels[rows])
            logp = checkpoint(_logp, self.hidden[rows], self.weight, self.labels[rows], use_reentrant=False)
            loss = loss + ((logp - ref_logp) ** 2).sum() / 2
        self._backward(loss / len(self.hidden))

    def naive(self) -> None:
        logp = (self.hidden @ self.weight.T).log_softmax(-1)
        with torch.no_grad():
            ref_logp = (self.ref_hidden @ self.ref_weight.T).log_softmax(-1)
        self._backward((logp.exp() * (logp - ref_logp)).sum(-1).mean())

    def liger(self) -> None:
        """Sampled k3 beside the policy loss; its own chunks of one sequence."""
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        def rows(x):
            return x.reshape(SEQUENCES, -1, *x.shape[1:])

        loss, _ = LigerFusedLinearGRPOLoss(beta=1.0, loss_type="bnpo", compiled=False)(
            rows(self.hidden), self.weight, rows(self.labels), torch.ones(rows(self.labels).shape), self.advantages,
            ref_input=rows(self.ref_hidden), ref_weight=self.ref_weight,
        )  # fmt: skip
        self._backward(loss)

    def _backward(self, loss: Tensor) -> None:
        for leaf in self.leaves:
            leaf.grad = None
        loss.backward()


def _logp(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return -cross_entropy(hidden @ weight.T, labels, reduction="none")


def run(repeats: int) -> list[Result]:
    size = f"N={POSITIONS}, H={HIDDEN}, V={VOCABULARY}, float32"
    results = in_turn(f"exact KL, {size}", Problem().variants(), max(3, repeats // 3), against=FLOOR)
    for result in results:
        if result.name != FLOOR:
            result.mebibytes = peak_in_a_process("benchmarks.exact", result.name)
    ours = results[1]
    for result in results[2:]:
        note = f"kl_from_hidden takes {ours.milliseconds / result.milliseconds:.2f} of its time"
        result.note = f"{note} and {ours.mebibytes / result.mebibytes:.2f} of its memory"
    return results


def main() -> None:
    name = sys.argv[sys.argv.index("--peak") + 1]
    Problem(64, 64, 640).variants()[name]()  # threads and libraries are there before memory is counted
    print(peak_of(Problem().variants()[name]))


if __name__ == "__main__":
    main()
