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
    label_slope: Callable[[Tensor], Tensor] | None = None,
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
    kind = DIRECTIONS.index(direction)
    block = min(BLOCK, triton.next_power_of_2(vocabulary))
    out = z.new_zeros(3, rows)
    normaliser, ref_normaliser, centre = z.new_empty(3, rows)
    grid = (rows,)
    _statistics[grid](
        z,
        r,
        normaliser,
        ref_normaliser,
        out,
        centre,
        z.stride(0),
        r.stride(0),
        vocabulary,
        DIRECTION=kind,
        BLOCK=block,
        num_warps=WARPS,
    )
    if labels is not None:
        column = labels.unsqueeze(-1)
        out[1] = z.gather(-1, column).squeeze(-1) - normaliser
        out[2] = r.gather(-1, column).squeeze(-1) - ref_normaliser
    slope = None if label_slope is None else label_slope(out[1])
    if weights is not None:
        zero = torch.zeros_like(weights) if slope is None else slope.contiguous()
        _gradient[grid](
            z, r, normaliser, ref_normaliser, centre, weights.contiguous(), zero, z.stride(0), r.stride(0), vocabulary,
            DIRECTION=kind, BLOCK=block, num_warps=WARPS,
        )  # fmt: skip
        if slope is not None:
            z.scatter_add_(-1, column, slope.unsqueeze(-1))
    return out


@triton.jit
def _log_ratio(a, b):
    """log a - log b to be weighted by a: 0 where a = 0."""
    return tl.where(a == float("-inf"), 0.0, a - b)


@triton.jit
def _statistics(
    z_ptr, r_ptr, normaliser_ptr, ref_normaliser_ptr, value_ptr, centre_ptr, z_stride, r_stride, vocabulary,
    DIRECTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    r_ptr += row * r_stride
    columns = tl.arange(0, BLOCK)
    lanes = tl.zeros((BLOCK,), z_ptr.dtype.element_ty)
    top, ref_top, mass, ref_mass = lanes - float("inf"), lanes - float("inf"), lanes, lanes
    # Online softmax in every lane, reduced once at the end.
    for start in range(0, vocabulary, BLOCK):
        inside = start + columns < vocabulary
        z = tl.load(z_ptr + start + columns, mask=inside, other=float("-inf"))
        r = tl.load(r_ptr + start + columns, mask=inside, other=float("-inf"))
        mass, top = _add_exp(mass, top, z)
        ref_mass, ref_top = _add_exp(ref_mass, ref_top, r)
    normaliser = _log_mass(mass, top)
    ref_normaliser = _log_mass(ref_mass, ref_top)

    value, centre = lanes, lanes
    for start in range(0, vocabulary, BLOCK):
        inside = start + columns < vocabulary
        z = tl.load(z_ptr + start + columns, mask=inside, other=float("-inf")) - normaliser
        r = tl.load(r_ptr + start + columns, mask=inside, other=float("-inf")) - ref_normaliser
        if DIRECTION == REVERSE:
            value += tl.exp(z) * _log_ratio(z, r)
        elif DIRECTION == FORWARD:
            value += tl.exp(r) * _log_ratio(r, z)
        else:
            difference = tl.exp(z) - tl.exp(r)
            value += difference * difference / 2
            centre += tl.exp(z) * difference
    total = tl.sum(value, 0)
    tl.store(normaliser_ptr + row, normaliser)
    tl.store(ref_normaliser_ptr + row, ref_normaliser)
    tl.store(value_ptr + row, total)
    tl.store(centre_ptr + row, total if DIRECTION == REVERSE else tl.sum(centre, 0))


@triton.jit
def _add_exp(mass, top, x):
    """Adds exp(x) to mass * exp(top), lane by lane; a lane that has seen only -inf stays at mass 0."""
    new_top = tl.maximum(top, x)
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    return mass * tl.exp(top - shift) + tl.exp(x - shift), new_top


@triton.jit
def _log_mass(mass, top):
    highest = tl.max(top, 0)
    return highest + tl.log(tl.sum(mass * tl.exp(top - highest), 0))


@triton.jit
def _gradient(
    z_ptr, r_ptr, normaliser_ptr, ref_normaliser_ptr, centre_ptr, weight_ptr, slope_ptr, z_stride, r_stride, vocabulary,
    DIRECTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * z_stride
    r_ptr += row * r_stride
    normaliser, ref_normaliser = tl.load(normaliser_ptr + row), tl.load(ref_normaliser_ptr + row)
    centre, weight, slope = tl.load(centre_ptr + row), tl.load(weight_ptr + row), tl.load(slope_ptr + row)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        z = tl.load(z_ptr + columns, mask=inside, other=float("-inf")) - normaliser
        r = tl.load(r_ptr + columns, mask=inside, other=float("-inf")) - ref_normaliser
        p = tl.exp(z)
        if DIRECTION == REVERSE:
            gradient = p * ((_log_ratio(z, r) - centre) * weight - slope)
        elif DIRECTION == FORWARD:
            gradient = p * (weight - slope) - tl.exp(r) * weight
        else:
            gradient = p * ((p - tl.exp(r) - centre) * weight - slope)
        tl.store(z_ptr + columns, gradient, mask=inside)
