"""kl_metrics: numbers by hand."""

import math

import pytest
import torch

from kl_plugins import KLConfig, kl_metrics

NAMES = {
    "sampled",
    "k1",
    "k2",
    "k3",
    "tail_up",
    "tail_down",
    "coef_mean",
    "coef_max",
    "clip_removed",
    "ess",
    "rho_max",
    "chi2",
}


def test_by_hand():
    logp = torch.tensor([[-1.0, -5.0, float("nan")], [-1.0, -0.5, -2.0]])
    ref_logp = torch.tensor([[-4.0, -1.0, 0.0], [-1.0, -1.0, -2.4]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    old_logp = logp.clone()
    old_logp[1, 1] -= math.log(2)
    m = kl_metrics(logp, ref_logp, mask=mask, old_logp=old_logp, config=KLConfig(estimator="k2"))
    log_ratio = torch.tensor([3.0, -4.0, 0.0, 0.5, 0.4])
    assert set(m) == NAMES
    assert all(type(v) is float for v in m.values())
    assert m["k1"] == pytest.approx(log_ratio.mean().item())
    assert m["sampled"] == pytest.approx((log_ratio.sum().item() - math.log(2)) / 5)
    assert m["k2"] == pytest.approx((log_ratio**2 / 2).mean().item())
    assert m["k3"] == pytest.approx((torch.exp(-log_ratio) - 1 + log_ratio).mean().item())
    assert (m["tail_up"], m["tail_down"]) == pytest.approx((0.2, 0.2))
    assert (m["coef_mean"], m["coef_max"]) == pytest.approx((7.9 / 5, 4.0))
    assert m["rho_max"] == pytest.approx(2.0)
    assert m["ess"] == pytest.approx(6**2 / (5 * 8))
    assert m["chi2"] == pytest.approx(((1 - torch.exp(-log_ratio)) ** 2).mean().item(), rel=1e-5)
    assert m["clip_removed"] == 0.0


def test_share_of_the_gradient_that_clipping_removed():
    logp, ref_logp, old_logp = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.2, -1.4]]), torch.tensor([[-0.5, -1.0]])
    m = kl_metrics(logp, ref_logp, mask=torch.ones(1, 2), old_logp=old_logp, config=KLConfig(correction="clip"))
    removed, kept = math.exp(-0.5) * 0.2, 0.4
    assert m["clip_removed"] == pytest.approx(removed / (removed + kept), rel=1e-5)


def test_no_valid_token_and_extremes():
    assert set(kl_metrics(torch.zeros(1, 2), torch.zeros(1, 2), mask=torch.zeros(1, 2)).values()) == {0.0}
    m = kl_metrics(torch.tensor([[-120.0]]), torch.tensor([[-1.0]]), mask=torch.ones(1, 1), config=KLConfig("k3"))
    assert all(math.isfinite(v) for v in m.values())


def test_cap_hides_nothing_from_rho_max():
    config = KLConfig(correction="is", ratio_cap=2.0)
    m = kl_metrics(
        torch.tensor([[-1.0]]),
        torch.tensor([[-1.0]]),
        mask=torch.ones(1, 1),
        old_logp=torch.tensor([[-4.0]]),
        config=config,
    )
    assert m["rho_max"] == pytest.approx(math.exp(3), rel=1e-5)


@pytest.mark.parametrize("mask_holds", [-1.0, math.nan])
def test_against_the_formulas(mask_holds):
    """Against the formulas on the whole, in float64; a NaN under the mask takes another way to the same numbers."""
    shape, config = (9, 1000), KLConfig(estimator="k3", correction="clip", clip_low=0.05)
    generator = torch.Generator().manual_seed(0)
    logp, ref_logp, old_logp = (-3 * torch.rand(shape, generator=generator) for _ in range(3))
    mask = torch.rand(shape, generator=generator) > 0.3
    m = kl_metrics(torch.where(mask, logp, mask_holds), ref_logp, mask=mask, old_logp=old_logp, config=config)
    logp, ref_logp, old_logp = (x[mask].double() for x in (logp, ref_logp, old_logp))
    ratio, rho = logp - ref_logp, (logp - old_logp).exp()
    c = 1 - torch.exp(-ratio)
    pull = rho.clamp(max=10) * c.abs()
    clipped = ((c > 0) & (rho < 0.95)) | ((c < 0) & (rho > 1.2))
    assert m == pytest.approx(
        {
            "sampled": (old_logp - ref_logp).mean().item(),
            "k1": ratio.mean().item(),
            "k2": (ratio**2 / 2).mean().item(),
            "k3": (torch.exp(-ratio) - 1 + ratio).mean().item(),
            "tail_up": (ratio > 2).double().mean().item(),
            "tail_down": (ratio < -2).double().mean().item(),
            "coef_mean": c.abs().mean().item(),
            "coef_max": c.abs().max().item(),
            "clip_removed": (pull[clipped].sum() / pull.sum()).item(),
            "ess": (rho.sum() ** 2 / (len(rho) * (rho**2).sum())).item(),
            "rho_max": rho.max().item(),
            "chi2": (c**2).mean().item(),
        },
        rel=1e-4,
        abs=1e-6,
    )
