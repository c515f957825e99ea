"""Exact KL: over the whole vocabulary at every position, at the price of a sampled one.

Given a state, KL needs no sample: both models' logits hold it (Rao-Blackwell; the full-vocabulary surrogate (51) of
https://arxiv.org/abs/2510.01555 with c = log_ratio). What makes it dear is memory, so rows are taken in chunks and the
gradient is made on the way forward: per chunk two products with the heads, one in-place step that turns the logits
into the gradient of the loss, two products back. No logits are kept and nothing is computed twice.

Shapes: N positions (any leading shape ``[...]``), H hidden size, V vocabulary; nats. ``direction``:

- ``"reverse"``: KL(pi || pi_ref) = sum_y pi (log pi - log pi_ref), what k2 descends from samples (12), (14);
- ``"forward"``: KL(pi_ref || pi), what k3 descends from samples (16);
- ``"mse"``: 1/2 sum_y (pi - pi_ref)^2, what mse descends from samples (65)-(67).

All are per state: summed over a response they are token credit, without what a token does to later states' KL (the
rest is a score-function term, ``credit="return"`` of :class:`kl_plugins.KLConfig`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kl_plugins.estimators import EXP_BOUND, get_estimator, log_ratio, upcast

DIRECTIONS = ("reverse", "forward", "mse")
# Logits that a thread turns into gradients at a time: with the reference's and a temporary, what a core's cache holds.
TILE = 2**17
# Rows of the head whose half-precision product is added to the float32 gradient at a time.
HEAD_ROWS = 2**14


class ExactKL(NamedTuple):
    """What one pass returns. Only ``loss`` carries a gradient; the rest is for logs and ratios, 0 where ignored."""

    loss: Tensor  # scalar: sum(token_weights * kl) + sum(token_loss)
    kl: Tensor  # [...]
    logp: Tensor | None  # [...] log pi(label); None without labels
    ref_logp: Tensor | None  # [...] log pi_ref(label); None without labels


def kl_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    *,
    labels: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = 512,
    direction: str = "reverse",
    token_weights: Tensor | None = None,
    token_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    softcap: float | None = None,
    ignore_index: int = -100,
    group: Any = None,
) -> ExactKL:
    """Exact KL of two language-model heads, with gradients to ``hidden``, ``weight`` and ``bias`` of the first.

    logits = softcap * tanh((hidden @ weight.T + bias) / softcap) / temperature. The gradient of ``weight`` is a sum
    over positions, so what each position weighs must be known before the pass: it is ``token_weights``, and the
    weighted sum comes back as ``loss``. Scale it by anything (beta, a loss scale) and call ``backward`` once.

    Arithmetic is float32 (float64 stays). On CUDA bfloat16 and float16 matrices are multiplied as they are, with
    float32 results; elsewhere they are cast up first.

    Args:
        hidden: ``[..., H]`` last hidden states of the policy.
        weight: ``[V, H]`` its head.
        ref_hidden: ``[..., H_ref]`` last hidden states of the reference; no gradient.
        ref_weight: ``[V, H_ref]`` its head; no gradient.
        labels: ``[...]`` int64, the token drawn at each position (already shifted). A position that holds
            ``ignore_index`` is left out: its hidden states may hold anything.
        temperature: divides both models' logits.
        chunk: rows taken at a time; the logits held are 8 * chunk * V bytes in float32. Fewer rows save memory, and
            cost time when the products no longer pay for reading the heads.
        direction: see the module.
        token_weights: ``[...]`` what each position's KL weighs in ``loss``; mask / tokens is a token mean. Default: 1.
        token_loss: ``f(logp, positions) -> [n]``, a policy loss of the label log-probabilities ``[n]`` at
            ``positions`` of the flattened batch (called with a few at a time), added to ``loss`` with its gradient.
        bias: ``[V]`` of the policy's head.
        ref_bias: ``[V]`` of the reference's; -inf in both excludes a token, -inf in it alone makes KL infinite.
        softcap: bound of both models' logits.
        ignore_index: label of the positions that do not count.
        group: torch.distributed group over which the vocabulary is sharded, in rank order: weights and biases are this
            rank's rows; hidden states, labels and results are replicated; grad hidden is summed over the group.

    Raises:
        ValueError: shapes, dtypes, labels or a setting do not fit.
        RuntimeError: from a second backward.
    """
    for name, x, w, b in (("", hidden, weight, bias), ("ref_", ref_hidden, ref_weight, ref_bias)):
        if x.shape[:-1] != hidden.shape[:-1] or w.shape != (len(weight), x.shape[-1]) or x.dtype != w.dtype:
            raise ValueError(
                f"{name}hidden {tuple(x.shape)} {x.dtype} and {name}weight {tuple(w.shape)} {w.dtype} must be [..., H] "
                f"and [V, H] of one dtype, with leading shape {tuple(hidden.shape[:-1])} and V={len(weight)}"
            )
        if b is not None and b.shape != (len(weight),):
            raise ValueError(f"{name}bias has shape {tuple(b.shape)}, needs ({len(weight)},)")
    task = _task(
        hidden.shape[:-1], hidden.device, len(weight), labels=labels, ignore_index=ignore_index,
        token_weights=token_weights, token_loss=token_loss, direction=direction, temperature=temperature,
        softcap=softcap, chunk=chunk, group=group,
    )  # fmt: skip
    policy, reference = (task.select(hidden), weight, bias), (task.select(ref_hidden), ref_weight, ref_bias)
    if not torch.is_grad_enabled():
        policy = [None if x is None else x.detach() for x in policy]
    reference = [None if x is None else _computable(x.detach()) for x in reference]
    return task.result(*_FromHidden.apply(*(x if x is None else _computable(x) for x in policy), reference, task))


def kl_from_logits(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    labels: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = 512,
    direction: str = "reverse",
    token_weights: Tensor | None = None,
    token_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ignore_index: int = -100,
    group: Any = None,
) -> ExactKL:
    """:func:`kl_from_hidden` for a model whose logits exist already, ``[..., V]`` each; the first get a gradient.

    Arguments and errors are those of :func:`kl_from_hidden`. The logits are not written to; beyond them it takes their
    gradient, in their own dtype, and one chunk.
    """
    if logits.dim() < 1 or logits.shape != ref_logits.shape:
        raise ValueError(f"logits {tuple(logits.shape)} and ref_logits {tuple(ref_logits.shape)} must be one [..., V]")
    task = _task(
        logits.shape[:-1], logits.device, logits.shape[-1], labels=labels, ignore_index=ignore_index,
        token_weights=token_weights, token_loss=token_loss, direction=direction, temperature=temperature,
        softcap=None, chunk=chunk, group=group,
    )  # fmt: skip
    logits = logits if torch.is_grad_enabled() else logits.detach()
    return task.result(*_FromLogits.apply(task.select(logits), task.select(ref_logits.detach()), task))


def kl_from_topk(
    topk_logp: Tensor,
    topk_ids: Tensor,
    ref_topk_logp: Tensor,
    *,
    labels: Tensor,
    logp: Tensor,
    ref_logp: Tensor,
    old_logp: Tensor | None = None,
    direction: str = "reverse",
    mask: Tensor | None = None,
) -> Tensor:
    """KL where only k tokens a position are known: exact on those, the drawn token for the rest, ``[...]``.

    sum_{y in topk} pi(y) f(y) + 1[label not in topk] rho f(label), with rho = pi / pi_old of the label. Value and
    gradient of the returned matrix are unbiased for KL and its gradient if the k tokens are chosen without looking at
    the drawn one: either model's own top k will do. k = V is exact; k = 0 is the sampled estimator (k2's gradient
    under "reverse").

    Args:
        topk_logp: ``[..., k]`` log pi of the k tokens, carries the gradient.
        topk_ids: ``[..., k]`` their ids, each once.
        ref_topk_logp: ``[..., k]`` log pi_ref of the same tokens.
        labels: ``[...]`` the drawn token.
        logp: ``[...]`` its log pi, carries the gradient.
        ref_logp: ``[...]`` its log pi_ref.
        old_logp: ``[...]`` its log-probability under the policy that drew it; None: on-policy, rho = 1.
        direction: see the module.
        mask: ``[...]`` True where a position counts; elsewhere value and gradient are 0 whatever the inputs hold.

    Raises:
        ValueError: shapes or direction do not fit.
    """
    _check_direction(direction)
    topk, one = topk_logp.shape, topk_logp.shape[:-1]
    for name, x, shape in (
        ("topk_ids", topk_ids, topk),
        ("ref_topk_logp", ref_topk_logp, topk),
        ("labels", labels, one),
        ("logp", logp, one),
        ("ref_logp", ref_logp, one),
        ("old_logp", old_logp, one),
        ("mask", mask, one),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, needs {tuple(shape)}")
    counts = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask != 0
    inside = counts.unsqueeze(-1) & (topk_logp > -math.inf)  # pi = 0 adds nothing
    outside = counts & ~(topk_ids == labels.unsqueeze(-1)).any(-1)
    rho = torch.ones_like(upcast(logp)) if old_logp is None else log_ratio(logp, old_logp).clamp(max=EXP_BOUND).exp()
    value, surrogate = _expectation(topk_logp, ref_topk_logp, upcast(topk_logp).exp(), inside, direction)
    rest, rest_surrogate = _expectation(logp, ref_logp, rho, outside, direction)
    surrogate = surrogate.sum(-1) + rest_surrogate
    return value.sum(-1) + rest + (surrogate - surrogate.detach())


def softmax_kl_gradient_(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    direction: str,
    labels: Tensor | None = None,
    weights: Tensor | None = None,
    label_slope: Callable[[Tensor, slice], Tensor] | None = None,
    group: Any = None,
) -> Tensor:
    """The step of one chunk: ``logits`` [n, V] become d loss / d logits, in place; ``ref_logits`` [n, V] are scratch.

    loss = sum(weights * kl) + a function of the label log-probabilities, whose gradient at some of the rows is
    ``label_slope(logp, rows)``. Without ``weights`` [n] nothing is differentiated and the logits are scratch too.
    Labels are [n], -1 on the ranks of ``group`` that do not hold them. Returns ``[3, n]``: kl, log pi(label),
    log pi_ref(label).
    """
    n, vocabulary = logits.shape
    label_logits = logits.new_zeros(2, n, 1)
    if labels is not None:
        here, column = (labels >= 0).unsqueeze(-1), labels.clamp(min=0).unsqueeze(-1)
        label_logits = torch.stack([torch.where(here, x.gather(-1, column), 0.0) for x in (logits, ref_logits)])
        _all_reduce(label_logits, group)
    # A CPU takes a few rows at a time, so that all passes but the first find them in cache; collectives take them all.
    tile = n if group is not None or logits.is_cuda else max(1, TILE * torch.get_num_threads() // vocabulary)
    statistics, slopes = [], []
    for start in range(0, n, tile):
        rows = slice(start, min(start + tile, n))
        measured = _measure_(logits[rows], ref_logits[rows], direction, group)
        statistics.append(torch.stack([measured.kl, *measured.log_masses]))
        if label_slope is not None:
            logp = label_logits[0, rows] - measured.log_masses[0]
            slopes.append(label_slope(logp.squeeze(-1), rows).unsqueeze(-1))
        if weights is not None:
            slope = slopes[-1] if slopes else None
            _differentiate_(measured, direction, weights[rows].unsqueeze(-1), slope)
    if slopes and weights is not None:
        logits.scatter_add_(-1, column, torch.where(here, torch.cat(slopes), 0.0))
    kl, *log_masses = torch.cat(statistics, 1)
    return torch.cat([kl, *(label_logits - torch.stack(log_masses))], -1).T


class _Measured(NamedTuple):
    """Some rows halfway: [rows, V] in the storage of the logits and one temporary, and columns [rows, 1]."""

    p: Tensor  # times mass, but for "mse"
    q: Tensor  # times ref_mass; overwritten but for "forward"
    difference: Tensor  # what p or q was weighted by
    mass: Tensor
    ref_mass: Tensor
    log_masses: Tensor  # [2, rows, 1] the logarithms of both softmaxes' denominators
    kl: Tensor
    centre: Tensor  # mean of difference under p (under q for "forward")


def _measure_(z: Tensor, r: Tensor, direction: str, group: Any) -> _Measured:
    # One temporary: three would go back to the system after every tile, and be faulted in again.
    if direction != "mse":
        difference = z - r if direction == "reverse" else r - z
    tops = _all_reduce(torch.stack([z.amax(-1, keepdim=True), r.amax(-1, keepdim=True)]), group, "max")
    p, q = z.sub_(tops[0]).exp_(), r.sub_(tops[1]).exp_()
    mass, ref_mass = masses = _all_reduce(torch.stack([p.sum(-1, keepdim=True), q.sum(-1, keepdim=True)]), group)
    log_mass, ref_log_mass = log_masses = masses.log() + tops
    if direction == "reverse":
        centre = _all_reduce(_weighted_sum(p, difference, out=q), group) / mass
        kl = centre + (ref_log_mass - log_mass)
    elif direction == "forward":
        centre = _all_reduce(_weighted_sum(q, difference), group) / ref_mass
        kl = centre + (log_mass - ref_log_mass)
    else:
        difference = torch.sub(p.div_(mass), q.div_(ref_mass), out=q)
        sums = torch.stack([x.sum(-1, keepdim=True) for x in (difference.square(), p * difference)])
        kl, centre = _all_reduce(sums, group)
        kl, mass = kl / 2, torch.ones_like(mass)
    return _Measured(p, q, difference, mass, ref_mass, log_masses, kl, centre)


def _differentiate_(rows: _Measured, direction: str, weight: Tensor, slope: Tensor | None) -> None:
    """Turns p into weight * d kl / d logits + slope * d log pi(label) / d logits, but for the label's own 1."""
    p, q, difference, mass, ref_mass = rows[:5]
    if direction == "forward":
        p.mul_((weight if slope is None else weight - slope) / mass).sub_(q.mul_(weight / ref_mass))
    else:
        difference.sub_(rows.centre).mul_(weight / mass)
        p.mul_(difference if slope is None else difference.sub_(slope / mass))


def _weighted_sum(a: Tensor, difference: Tensor, out: Tensor | None = None) -> Tensor:
    """Sum of a * difference, [rows, 1], difference being log a - log b up to a constant.

    Where tokens are excluded the difference is mended in place: 0 where a = 0, inf where only b = 0.
    """
    total = torch.mul(a, difference, out=out).sum(-1, keepdim=True)
    if total.isnan().any():
        difference.nan_to_num_(nan=0.0, posinf=math.inf, neginf=0.0)
        total = torch.mul(a, difference, out=out).sum(-1, keepdim=True)
    return total


def _all_reduce(x: Tensor, group: Any, operation: str = "sum") -> Tensor:
    """``x`` summed, or its largest, over the ranks of a group, in place; ``x`` without one."""
    if group is not None:
        reduce = torch.distributed.ReduceOp
        torch.distributed.all_reduce(x, reduce.MAX if operation == "max" else reduce.SUM, group=group)
    return x


@dataclasses.dataclass(frozen=True)
class _Task:
    """One call: its settings, and its inputs at the n positions that count."""

    direction: str
    temperature: float
    softcap: float | None
    chunk: int
    group: Any
    shape: torch.Size  # leading shape of the inputs
    positions: Tensor  # [n] in the flattened batch
    labels: Tensor | None  # [n] rows of the local head, -1: another rank's
    weights: Tensor  # [n]
    token_loss: Callable[[Tensor, Tensor], Tensor] | None

    def select(self, x: Tensor) -> Tensor:
        """``[..., F]`` to ``[n, F]``."""
        x = x.reshape(-1, x.shape[-1])
        return x if len(x) == len(self.positions) else x[self.positions]

    def run(self, make: Callable, use: Callable | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All chunks: ``make(rows)`` gives both models' raw logits, ``use(rows, g)`` takes the gradient to the first,
        times temperature. Returns the loss and the step's ``[3, n]``."""
        weights = self.weights.to(dtype)
        out = weights.new_zeros(3, len(weights))
        token_losses: list[Tensor] = []
        for start in range(0, len(weights), self.chunk):
            rows = slice(start, min(start + self.chunk, len(weights)))
            logits, ref_logits = make(rows)
            if self.softcap is not None:
                cap_slope = _cap_(logits, self.softcap)
                _cap_(ref_logits, self.softcap)
            if self.temperature != 1:
                logits.div_(self.temperature)
                ref_logits.div_(self.temperature)
            out[:, rows] = _step_for(logits, self.group)(
                logits,
                ref_logits,
                direction=self.direction,
                labels=None if self.labels is None else self.labels[rows],
                weights=None if use is None else weights[rows],
                label_slope=self._label_slope(rows, use is not None, token_losses),
                group=self.group,
            )
            if use is not None:
                use(rows, logits if self.softcap is None else logits.mul_(cap_slope))
        return sum(token_losses, (weights * out[0]).sum()), out

    def _label_slope(self, chunk: slice, differentiate: bool, values: list[Tensor]) -> Callable | None:
        """The step's ``label_slope`` for a chunk; sums of ``token_loss`` go to ``values``."""
        if self.token_loss is None:
            return None
        positions = self.positions[chunk]

        def label_slope(logp: Tensor, rows: slice) -> Tensor:
            with torch.set_grad_enabled(differentiate):
                leaf = logp.clone().requires_grad_(differentiate)
                value = self.token_loss(leaf, positions[rows])
                if value.shape != leaf.shape:
                    raise ValueError(
                        f"token_loss gave {tuple(value.shape)} for logp {tuple(leaf.shape)}: must be equal"
                    )
                values.append(value.detach().sum())
                return torch.autograd.grad(value.sum(), leaf)[0] if differentiate else torch.zeros_like(leaf)

        return label_slope

    def result(self, loss: Tensor, per_row: Tensor) -> ExactKL:
        """``[3, n]`` spread back to three ``[...]``."""
        flat = per_row.new_zeros(3, math.prod(self.shape)).index_copy_(1, self.positions, per_row)
        kl, logp, ref_logp = flat.reshape(3, *self.shape)
        return ExactKL(loss, kl, logp, ref_logp) if self.labels is not None else ExactKL(loss, kl, None, None)


def _task(
    shape, device, vocabulary, *, labels, ignore_index, token_weights, token_loss, direction, temperature, softcap,
    chunk, group,
) -> _Task:  # fmt: skip
    """What both entries check, and the choice of the positions that count."""
    _check_direction(direction)
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature={temperature} must be finite and > 0")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} must be > 0, or None for no bound")
    if chunk < 1:
        raise ValueError(f"chunk={chunk} must be at least 1 row")
    if token_loss is not None and labels is None:
        raise ValueError("token_loss is a loss of the labels' log-probabilities: give labels")
    for name, x in (("labels", labels), ("token_weights", token_weights)):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, needs {tuple(shape)}: one a position")
    positions = torch.arange(math.prod(shape), device=device)
    if labels is not None:
        positions = (labels.reshape(-1) != ignore_index).nonzero().squeeze(-1)
        labels = _local_labels(labels.reshape(-1)[positions], vocabulary, group)
    weights = torch.ones(shape, device=device) if token_weights is None else upcast(token_weights)
    weights = weights.reshape(-1)[positions]
    return _Task(direction, temperature, softcap, chunk, group, shape, positions, labels, weights, token_loss)


class _FromHidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, reference, task):
        ref_hidden, ref_weight, ref_bias = reference
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # One pair of buffers for all chunks: fresh ones would cost a page fault every 4 KiB.
        buffer, ref_buffer = hidden.new_empty(2, min(task.chunk, len(hidden)), len(weight), dtype=dtype)
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden, dtype=dtype) if to_hidden else None
        # The first chunk writes it: zeros would be one more pass over the head.
        fresh = torch.empty_like if len(hidden) else torch.zeros_like
        grad_weight = fresh(weight, dtype=dtype) if to_weight else None
        grad_bias = torch.zeros_like(bias, dtype=dtype) if to_bias else None

        def make(rows):
            n = rows.stop - rows.start
            logits = _project(hidden[rows], weight, bias, buffer[:n])
            return logits, _project(ref_hidden[rows], ref_weight, ref_bias, ref_buffer[:n])

        def use(rows, gradient):
            if to_bias:
                grad_bias.add_(gradient.sum(0))
            gradient = gradient.to(weight.dtype)
            if to_hidden:
                _product(gradient, weight, grad_hidden[rows])
            if to_weight:
                (_add_product if rows.start else _product)(gradient.T, hidden[rows], grad_weight)

        loss, per_row = task.run(make, use if any(ctx.needs_input_grad[:3]) else None, dtype)
        if to_hidden:
            _all_reduce(grad_hidden, task.group)
        ctx.gradients, ctx.temperature = [grad_hidden, grad_weight, grad_bias], task.temperature
        ctx.dtypes = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        ctx.mark_non_differentiable(per_row)
        return loss, per_row

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        return *_scaled_gradients(ctx, grad_loss), None, None


class _FromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ref_logits, task):
        dtype = torch.promote_types(logits.dtype, torch.float32)
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        loss, per_row = task.run(
            lambda rows: [x[rows].to(dtype, copy=True) for x in (logits, ref_logits)],
            None if gradient is None else lambda rows, g: gradient[rows].copy_(g),
            dtype,
        )
        ctx.gradients, ctx.temperature, ctx.dtypes = [gradient], task.temperature, [logits.dtype]
        ctx.mark_non_differentiable(per_row)
        return loss, per_row

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):
        return *_scaled_gradients(ctx, grad_loss), None, None


def _scaled_gradients(ctx, grad_loss: Tensor) -> list[Tensor | None]:
    """Forward's gradients times the upstream scalar, in place: a copy of the head's would be its size again."""
    if ctx.gradients is None:
        raise RuntimeError(
            "exact KL makes its gradients in forward and its first backward uses them up: call backward once, on the "
            "sum of all that depends on the loss, without retain_graph"
        )
    gradients, ctx.gradients = ctx.gradients, None
    scale = grad_loss / ctx.temperature
    return [None if g is None else g.mul_(scale).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]


def _step_for(logits: Tensor, group: Any) -> Callable:
    if logits.is_cuda and group is None:
        from kl_plugins import exact_triton

        return exact_triton.softmax_kl_gradient_
    return softmax_kl_gradient_


def _cap_(logits: Tensor, cap: float) -> Tensor:
    """Soft-cap in place; returns the slope, 1 - tanh^2."""
    logits.div_(cap).tanh_()
    slope = 1 - logits.square()
    logits.mul_(cap)
    return slope


def _computable(x: Tensor) -> Tensor:
    """Half precision cast up where no product of it has float32 results; autograd casts the gradient back."""
    return x if x.is_cuda else x.to(torch.promote_types(x.dtype, torch.float32))


def _project(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    _product(hidden, weight.T, out)
    return out if bias is None else out.add_(bias)


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def _add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b."""
    if a.dtype == out.dtype:
        out.addmm_(a, b)
        return
    for part, factor in zip(out.split(HEAD_ROWS), a.split(HEAD_ROWS), strict=True):
        part.add_(torch.mm(factor, b, out_dtype=out.dtype))


def _local_labels(labels: Tensor, vocabulary: int, group: Any) -> Tensor:
    """Labels as rows of the local head, -1: another rank's."""
    sizes, rank = torch.tensor([vocabulary], device=labels.device), 0
    if group is not None:
        rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        sizes = _all_reduce(torch.where(torch.arange(ranks, device=labels.device) == rank, vocabulary, 0), group)
    wrong = (labels < 0) | (labels >= sizes.sum())
    if wrong.any():
        raise ValueError(
            f"label {labels[wrong][0].item()} is not in [0, {int(sizes.sum())}): a position that does not count is "
            "marked with ignore_index"
        )
    labels = labels - sizes[:rank].sum()
    return torch.where((labels >= 0) & (labels < vocabulary), labels, -1)


def _expectation(logp: Tensor, ref_logp: Tensor, weight: Tensor, used: Tensor, direction: str) -> tuple[Tensor, Tensor]:
    """weight * f, whose mean under pi is the KL, and a surrogate whose gradient has the KL's gradient as its mean."""
    x = torch.where(used, logp.to(upcast(logp).dtype), 0.0)
    ref_x = torch.where(used, ref_logp, 0.0)
    if direction == "reverse":
        value = coefficient = log_ratio(x, ref_x)
    elif direction == "forward":
        r = log_ratio(x, ref_x).clamp(min=-EXP_BOUND)
        value, coefficient = -r * torch.exp(-r), get_estimator("k3").coefficient(x, ref_x)
    else:
        value, coefficient = get_estimator("mse").value(x, ref_x), get_estimator("mse").coefficient(x, ref_x)
    weight = torch.where(used, weight, 0.0)
    return weight * value, weight * coefficient * x


def _check_direction(direction: str) -> None:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction={direction!r}: one of {', '.join(DIRECTIONS)}")
