"""The head beside what it replaces: [256, 2048], value, aggregation and backward, in whichever framework is here."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import Result, in_turn, release
from kl_plugins import KLConfig
from kl_plugins.head import head_terms
from kl_plugins.metrics import measure

SHAPE = (256, 2048)


def run(repeats: int) -> list[Result]:
    results = []
    if importlib.util.find_spec("verl"):
        results += _compare(release("verl"), *_verl(), repeats)
    if importlib.util.find_spec("openrlhf"):
        results += _compare(release("openrlhf"), *_openrlhf(), repeats)
    return results or _compare(release("torch"), lambda m, mask: (m * mask).sum() / mask.sum(), {}, repeats)


def batch(shape=SHAPE, dtype=torch.float32) -> dict[str, Tensor]:
    """A batch as after generation: each response ends somewhere in the second half."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = shape
    logp = -3 * torch.rand(shape, generator=generator)
    ends = torch.randint(columns // 2, columns + 1, (rows, 1), generator=generator)
    return {
        "logp": logp.to(dtype).requires_grad_(),
        "ref_logp": (logp + 0.1 * torch.randn(shape, generator=generator)).to(dtype),
        "old_logp": (logp + 0.05 * torch.randn(shape, generator=generator)).to(dtype),
        "mask": torch.arange(columns) < ends,
    }


def forward_backward(loss: Callable[[], Tensor], data: dict[str, Tensor]) -> Callable[[], None]:
    def call() -> None:
        data["logp"].grad = None
        loss().backward()

    return call


def ours(data: dict[str, Tensor], aggregate: Callable, metrics: bool = False, **axes) -> Callable[[], Tensor]:
    """The loss under ``KLConfig(**axes)`` as the plugins make it."""
    config = KLConfig(**axes)
    terms = dict(mask=data["mask"], config=config)
    if config.correction != "none":
        terms["old_logp"] = data["old_logp"]

    def loss() -> Tensor:
        made = head_terms(data["logp"], data["ref_logp"], **terms)
        if metrics:  # as the plugins make both
            measure(made)
        return aggregate(made.matrix(data["logp"]), data["mask"])

    return loss


def _verl() -> tuple[Callable, dict[str, Callable]]:
    from verl.trainer.ppo.core_algos import agg_loss, kl_penalty

    return lambda m, mask: agg_loss(m, mask, "token-mean"), {
        "kl_penalty(k3) + agg_loss": lambda logp, ref_logp, old_logp: kl_penalty(logp, ref_logp, "k3")
    }


def _openrlhf() -> tuple[Callable, dict[str, Callable]]:
    os.environ.setdefault("KL_PLUGINS_CPU", "1")
    from kl_plugins.cpu.openrlhf import install

    install()  # without it openrlhf.models cannot be imported where there is no flash-attn
    from openrlhf.models.loss import aggregate_loss
    from openrlhf.models.utils import compute_approx_kl

    def native(logp, ref_logp, old_logp):
        return compute_approx_kl(logp, ref_logp, kl_estimator="k3", unbiased_gradient=True)

    def corrected(logp, ref_logp, old_logp):
        return compute_approx_kl(logp, ref_logp, old_logp, kl_estimator="k3", unbiased_gradient=True)

    return lambda m, mask: aggregate_loss(m, mask), {
        "compute_approx_kl(k3, unbiased_gradient) + aggregate_loss": native,
        "the same with log_probs_old": corrected,
    }


def _others() -> dict[str, Callable]:
    """What takes the same place and is no framework's."""
    known = {"k2 in plain torch": lambda logp, ref_logp, old_logp: (logp - ref_logp).square() / 2}
    if importlib.util.find_spec("polgrad"):
        from polgrad.kl import KLEstimator, kl_estimate

        mask = batch()["mask"]
        known[f"{release('polgrad')}, kl_estimate(k2)"] = lambda logp, ref_logp, old_logp: kl_estimate(
            logp, ref_logp, KLEstimator.K2, response_mask=mask
        )
    return known


def _compare(framework: str, aggregate: Callable, natives: dict[str, Callable], repeats: int) -> list[Result]:
    def native(function, data):
        columns = [data[name] for name in ("logp", "ref_logp", "old_logp")]
        return lambda: aggregate(function(*columns), data["mask"])

    def alone(data):
        return lambda: aggregate(data["logp"], data["mask"])

    def compare(title, data, losses):
        variants = {name: forward_backward(loss, data) for name, loss in losses.items()}
        return in_turn(f"head, {framework}, {title}", variants, repeats)

    data, half = batch(), batch(dtype=torch.bfloat16)
    natives = natives | _others()
    first = next(iter(natives))
    results = compare(
        "float32",
        data,
        {name: native(function, data) for name, function in natives.items()}
        | {
            "aggregation alone": alone(data),
            "kl_head k2": ours(data, aggregate),
            "kl_head k3": ours(data, aggregate, estimator="k3"),
            "kl_head k2, report k3": ours(data, aggregate, report="k3"),
            "kl_head k2, clip": ours(data, aggregate, correction="clip"),
            "kl_head k2 and kl_metrics": ours(data, aggregate, metrics=True),
            "kl_head k2, clip and kl_metrics": ours(data, aggregate, metrics=True, correction="clip"),
        },
    )
    for title, inputs, prepare in (("bfloat16", half, lambda loss: loss), ("torch.compile", data, torch.compile)):
        few = {first: native(natives[first], inputs)}
        few |= {"aggregation alone": alone(inputs), "kl_head k2": ours(inputs, aggregate)}
        results += compare(title, inputs, {name: prepare(loss) for name, loss in few.items()})
    return results
