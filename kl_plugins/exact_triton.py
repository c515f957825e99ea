"""The chunk's step of :mod:`kl_plugins.exact` as Triton kernels, for CUDA: three reads and one write of the logits.

One program a row. Imported only when a CUDA tensor arrives; tested against the torch step in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kl_plugins.exact import DIRECTIONS

BLOCK, WARPS = 2048, 8
REVERSE, FORWARD = tl.constexpr(DIRECTIONS.index("reverse")), tl.constexpr(DIRECTIONS.index("forward"))


def softmax_kl_gradient_(
    logits: Tensor,
    ref_logits: Tensor,
    *,
    direction: str,
    labels: Tensor | None = None,
    weights: Tensor | None = None,
    label_slope: Callable[[Tensor, slice], Tensor] | None = None,
    group: None = None,
) -> Tensor:
    """:func:`kl_plugins.exact.softmax_kl_gradient_`, for a whole vocabulary; ``ref_logits`` are only read.

    Raises:
        ValueError: ``group`` is given: a sharded vocabulary takes the torch step.
    """
    if group is not None:
        raise ValueError(
            "the Triton step takes a whole vocabulary: use kl_plugins.exact.softmax_kl_gradient_ with group"
        )
    z, r = logits, ref_logits
    rows, vocabulary = z.shape
    if z.stride(-1) != 1 or r.stride(-1) != 1:
        raise ValueError(f"logits must be contiguous in the vocabulary, strides are {z.stride()} and {r.stride()}")
    shape = dict(DIRECTION=DIRECTIONS.index(direction), BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)))
    # Per row: kl, the largest logits, the sums of exp(logit - largest), and what p's gradient is centred at.
    kl, top, ref_top, mass, ref_mass, _ = rows_of = z.new_empty(6, rows)
    _statistics[(rows,)](z, r, rows_of, z.stride(0), r.stride(0), rows, vocabulary, num_warps=WARPS, **shape)
    out = z.new_zeros(3, rows)
    out[0] = kl
    if labels is not None:
        column = labels.unsqueeze(-1)
        out[1] = z.gather(-1, column).squeeze(-1) - (top + mass.log())
        out[2] = r.gather(-1, column).squeeze(-1) - (ref_top + ref_mass.log())
    slope = None if label_slope is None else label_slope(out[1], slice(0, rows))
    if weights is not None:
        factors = torch.stack([weights, torch.zeros_like(weights) if slope is None else slope])
        _gradient[(rows,)](z, r, rows_of, factors, z.stride(0), r.stride(0), rows, vocabulary, num_warps=WARPS, **shape)
        if slope is not None:
            z.scatter_add_(-1, column, slope.unsqueeze(-1))
    return out


@triton.jit
def _log_ratio(a, b):
    """log a - log b, up to a constant, to be weighted by a: 0 where a = 0."""
    return tl.where(a == float("-inf"), 0.0, a - b)


@triton.jit
def _statistics(
    z_ptr, r_ptr, rows_ptr, z_stride, r_stride, rows, vocabulary, DIRECTION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    r_ptr += row * r_stride
    rows_ptr += row
    columns = tl.arange(0, BLOCK)
    lanes = tl.zeros((BLOCK,), z_ptr.dtype.element_ty)
    tops, ref_tops, masses, ref_masses = lanes - float("inf"), lanes - float("inf"), lanes, lanes
    # Online softmax in every lane, reduced once at the end.
    for start in range(0, vocabulary, BLOCK):
        inside = start + columns < vocabulary
        z = tl.load(z_ptr + start + columns, mask=inside, other=float("-inf"))
        r = tl.load(r_ptr + start + columns, mask=inside, other=float("-inf"))
        masses, tops = _add_exp(masses, tops, z)
        ref_masses, ref_tops = _add_exp(ref_masses, ref_tops, r)
    top, ref_top = tl.max(tops, 0), tl.max(ref_tops, 0)
    mass = tl.sum(masses * tl.exp(tops - top), 0)
    ref_mass = tl.sum(ref_masses * tl.exp(ref_tops - ref_top), 0)

    values, centres = lanes, lanes
    for start in range(0, vocabulary, BLOCK):
        inside = start + columns < vocabulary
        z = tl.load(z_ptr + start + columns, mask=inside, other=float("-inf"))
        r = tl.load(r_ptr + start + columns, mask=inside, other=float("-inf"))
        p, q = tl.exp(z - top), tl.exp(r - ref_top)
        if DIRECTION == REVERSE:
            values += p * _log_ratio(z, r)
        elif DIRECTION == FORWARD:
            values += q * _log_ratio(r, z)
        else:
            difference = p / mass - q / ref_mass
            values += difference * difference / 2
            centres += p / mass * difference
    value, centre = tl.sum(values, 0), tl.sum(centres, 0)
    shift = ref_top - top + tl.log(ref_mass / mass)  # log normaliser of the reference less the policy's
    if DIRECTION == REVERSE:
        centre = value / mass
        value = centre + shift
    elif DIRECTION == FORWARD:
        value = value / ref_mass - shift
    tl.store(rows_ptr, value)
    tl.store(rows_ptr + rows, top)
    tl.store(rows_ptr + 2 * rows, ref_top)
    tl.store(rows_ptr + 3 * rows, mass)
    tl.store(rows_ptr + 4 * rows, ref_mass)
    tl.store(rows_ptr + 5 * rows, centre)


@triton.jit
def _add_exp(mass, top, x):
    """Adds exp(x) to mass * exp(top), lane by lane; a lane that has seen only -inf stays at mass 0."""
    new_top = tl.maximum(top, x)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    return mass * tl.exp(top - shift) + tl.exp(x - shift), new_top


@triton.jit
def _gradient(
    z_ptr, r_ptr, rows_ptr, factors_ptr, z_stride, r_stride, rows, vocabulary, DIRECTION: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    r_ptr += row * r_stride
    rows_ptr += row
    top, ref_top = tl.load(rows_ptr + rows), tl.load(rows_ptr + 2 * rows)
    mass, ref_mass = tl.load(rows_ptr + 3 * rows), tl.load(rows_ptr + 4 * rows)
    centre = tl.load(rows_ptr + 5 * rows)
    weight, slope = tl.load(factors_ptr + row), tl.load(factors_ptr + rows + row)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        z = tl.load(z_ptr + columns, mask=inside, other=float("-inf"))
        r = tl.load(r_ptr + columns, mask=inside, other=float("-inf"))
        p = tl.exp(z - top) / mass
        if DIRECTION == REVERSE:
            gradient = p * ((_log_ratio(z, r) - centre) * weight - slope)
        else:
            q = tl.exp(r - ref_top) / ref_mass
            if DIRECTION == FORWARD:
                gradient = p * (weight - slope) - q * weight
            else:
                gradient = p * ((p - q - centre) * weight - slope)
        tl.store(z_ptr + columns, gradient, mask=inside)
