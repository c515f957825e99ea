"""Run by test_exact_triton.py in a process of its own: the interpreter must be chosen before triton is imported."""

import math

import pytest
import torch

from kl_plugins import exact, exact_triton


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("vocabulary", [7, 2048, 5000])
@pytest.mark.parametrize("direction", exact.DIRECTIONS)
@pytest.mark.parametrize("policy", [False, True])
def test_against_the_torch_step(dtype, vocabulary, direction, policy):
    generator = torch.Generator().manual_seed(0)
    logits, ref_logits = (3 * torch.randn(4, vocabulary, generator=generator, dtype=dtype) for _ in range(2))
    logits[:, :2] = ref_logits[:, :2] = -math.inf  # excluded by both
    (logits if direction == "reverse" else ref_logits)[0, 3] = -math.inf  # by the one whose weight is 0 there
    logits[1], ref_logits[1, 4] = logits[1] * 30, 300.0  # far apart
    labels = torch.tensor([4, 5, 6, 4])
    weights, slopes = torch.rand(2, 4, generator=generator, dtype=dtype)
    results = []
    for step in (exact.softmax_kl_gradient_, exact_triton.softmax_kl_gradient_):
        z = logits.clone()
        out = step(
            z,
            ref_logits.clone(),
            direction=direction,
            labels=labels,
            weights=weights,
            label_slope=(lambda logp, rows: slopes[rows] * logp) if policy else None,
        )
        results.append((out, z))
    (out, gradient), (triton_out, triton_gradient) = results
    assert torch.isfinite(gradient).all()
    tolerance = dict(rtol=1e-12, atol=1e-12) if dtype == torch.float64 else dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(triton_out, out, **tolerance)
    torch.testing.assert_close(triton_gradient, gradient, **tolerance)


def test_without_gradient_the_logits_stay():
    logits, ref_logits = torch.randn(3, 50), torch.randn(3, 50)
    before = logits.clone()
    out = exact_triton.softmax_kl_gradient_(logits, ref_logits, direction="reverse")
    assert torch.equal(logits, before)
    torch.testing.assert_close(
        out[0], (before.softmax(-1) * (before.log_softmax(-1) - ref_logits.log_softmax(-1))).sum(-1)
    )


def test_a_group_is_refused():
    with pytest.raises(ValueError, match="whole vocabulary"):
        exact_triton.softmax_kl_gradient_(torch.zeros(1, 2), torch.zeros(1, 2), direction="reverse", group=object())
