"""One of two ranks that share a vocabulary: python shard_rank.py RANK FILE."""

import math
import sys

import torch
import torch.distributed as dist
from naive import naive

from kl_plugins.exact import DIRECTIONS, kl_from_hidden, kl_from_logits

rank = int(sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{sys.argv[2]}")
N, H, V = 11, 6, 37
mine = (slice(0, 20), slice(20, V))[rank]  # uneven on purpose
generator = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


hidden, weight, ref_hidden, ref_weight = draw(N, H), draw(V, H), draw(N, H), draw(V, H)
bias = draw(V)
bias[[1, 30]] = -math.inf
labels = torch.arange(N) * 3 + 2
labels[4] = -100
weights, advantages = draw(N).square(), draw(N)
counts = labels != -100


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


for direction in DIRECTIONS:
    whole = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    kl, logp, ref_logp = naive(*whole, ref_hidden, ref_weight, direction, 0.7, bias, bias)
    picked = logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    slow = torch.where(counts, weights * kl + advantages * picked, 0.0).sum()
    expected = torch.autograd.grad(slow, whole)

    shared = dict(
        labels=labels,
        temperature=0.7,
        direction=direction,
        token_weights=weights,
        token_loss=lambda logp, positions: advantages[positions] * logp,
        chunk=4,
        group=dist.group.WORLD,
    )
    sharded = [hidden.clone().requires_grad_(), weight[mine].clone().requires_grad_()]
    out = kl_from_hidden(*sharded, ref_hidden, ref_weight[mine], bias=bias[mine], ref_bias=bias[mine], **shared)
    close(out.loss, slow)
    close(out.kl, torch.where(counts, kl, 0.0))
    close(out.logp, torch.where(counts, picked, 0.0))
    gradients = torch.autograd.grad(out.loss, sharded)
    close(gradients[0], expected[0])
    close(gradients[1], expected[1][mine])

    logits = (hidden @ weight.T + bias)[:, mine].requires_grad_()
    ref_logits = (ref_hidden @ ref_weight.T + bias)[:, mine]
    out = kl_from_logits(logits, ref_logits, **shared)
    close(out.loss, slow)
    close(torch.autograd.grad(out.loss, logits)[0].T @ hidden, expected[1][mine])
dist.barrier()  # or the slower rank's last collective finds nobody
dist.destroy_process_group()
