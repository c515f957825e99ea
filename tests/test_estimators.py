"""Estimators: hand-computed constants, extremes, the registry. Case numbers: faults reported against frameworks."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_plugins import KLConfig, KLEstimator, get_estimator, register_estimator, registered_estimators

BUILT_IN = ["k1", "k2", "k3", "mse", "none"]
FINITE = st.floats(min_value=-1e30, max_value=0.0)


def one(name, logp, ref_logp, dtype=torch.float64):
    estimator = get_estimator(name)
    logp, ref_logp = torch.tensor([[logp]], dtype=dtype), torch.tensor([[ref_logp]], dtype=dtype)
    return estimator.value(logp, ref_logp).item(), estimator.coefficient(logp, ref_logp).item()


@pytest.mark.parametrize(
    ("name", "logp", "ref_logp", "value", "coefficient"),
    [
        ("k1", -13.0, -1.0, -12.0, 1.0),
        ("k2", -13.0, -1.0, 72.0, -12.0),  # case 2: no cap on the pull
        ("k3", -4.0, -1.0, 16.0855369232, -19.0855369232),
        ("k3", -0.1, -2.3, 1.3108031584, 0.8891968416),  # case 7: direction
        ("k3", -1.0, -1.2, 0.0187307531, 0.1812692469),
        ("k3", -2.0, -2.4, 0.0703200460, 0.3296799540),
        ("mse", math.log(0.7), math.log(0.5), 0.04 / 1.4, 0.2),
        ("none", -1.0, -2.0, 1.0, 0.0),
    ],
)
def test_constants(name, logp, ref_logp, value, coefficient):
    assert one(name, logp, ref_logp) == pytest.approx((value, coefficient), rel=1e-8)


def test_swapped_arguments_give_another_number():
    assert one("k3", -2.3, -0.1)[0] == pytest.approx(5.825013, rel=1e-6)


def test_overflow_in_exp_is_bounded_and_still_pulls_back():
    value, coefficient = one("k3", -120.0, -1.0, torch.float32)  # case 1
    assert math.isfinite(value)
    assert coefficient == pytest.approx(1 - math.exp(20), rel=1e-6)


def test_half_precision_is_computed_in_float32():
    value, _ = one("k3", -12.5, -0.5, torch.float16)  # case 3
    assert value == pytest.approx(162741.79, rel=1e-6)


def test_negative_k1_is_not_clamped():
    logp, ref_logp = torch.tensor([[-3.0, -2.5]]), torch.tensor([[-2.0, -2.0]])  # case 6
    means = [get_estimator(n).value(logp, ref_logp).mean().item() for n in ("k1", "k2", "k3")]
    assert means == pytest.approx([-0.75, 0.3125, 0.4335015], rel=1e-6)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
@given(logp=st.floats(-8, -0.01), ref_logp=st.floats(-8, -0.01))
def test_coefficient_is_the_derivative_of_the_value(name, logp, ref_logp):
    step = 1e-6
    slope = (one(name, logp + step, ref_logp)[0] - one(name, logp - step, ref_logp)[0]) / (2 * step)
    assert one(name, logp, ref_logp)[1] == pytest.approx(slope, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@given(logp=FINITE, ref_logp=FINITE)
def test_finite_in_finite_out(name, dtype, logp, ref_logp):
    bound = torch.finfo(dtype).min
    value, coefficient = one(name, max(logp, bound), max(ref_logp, bound), dtype)
    assert math.isfinite(value)
    assert math.isfinite(coefficient)
    if name in ("k2", "k3", "mse"):
        assert value >= 0


@given(log_ratio=st.floats(-60, 60).filter(lambda x: abs(x) > 1e-3))
def test_k3_keeps_the_sign_of_the_log_ratio(log_ratio):
    assert math.copysign(1, one("k3", -70 + log_ratio, -70)[1]) == math.copysign(1, log_ratio)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(ValueError, match="unknown KL estimator 'k22': did you mean 'k2'"):
        get_estimator("k22")


def test_built_ins_cite_and_state_their_objective():
    assert set(BUILT_IN) <= set(registered_estimators())
    for name in BUILT_IN:
        assert "arXiv" in get_estimator(name).citation
        assert get_estimator(name).objective


def test_registering():
    class Half(KLEstimator):
        def value(self, logp, ref_logp):
            return (logp - ref_logp).float() / 2

        def coefficient(self, logp, ref_logp):
            return torch.full_like(logp, 0.5, dtype=torch.float32)

    register_estimator("test_half")(Half)
    register_estimator("test_half")(Half)  # a module imported twice is harmless
    assert get_estimator("test_half").name == "test_half"
    assert "descends an objective that its class does not state" in KLConfig(estimator="test_half").describe()
    with pytest.raises(ValueError, match="'k2' is already registered by kl_plugins.estimators.K2"):
        register_estimator("k2")(Half)
    with pytest.raises(ValueError, match="lower-case"):
        register_estimator("Half")(Half)
    with pytest.raises(TypeError, match="does not define coefficient"):
        register_estimator("test_valueless")(type("V", (KLEstimator,), {"value": Half.value}))


def test_entry_points_add_estimators_and_broken_ones_are_named(tmp_path):
    (tmp_path / "third_party_kl.py").write_text(
        "import torch\nfrom kl_plugins import KLEstimator\n"
        "class Third(KLEstimator):\n"
        "    def value(self, logp, ref_logp): return logp - ref_logp\n"
        "    def coefficient(self, logp, ref_logp): return torch.ones_like(logp)\n"
    )
    info = tmp_path / "third_party-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")

    def run(entry):
        (info / "entry_points.txt").write_text(f"[kl_plugins.estimators]\nthird = {entry}\n")
        code = (
            f"import sys; sys.path.append({str(tmp_path)!r})\n"
            "from kl_plugins import get_estimator\nprint(get_estimator('third').name)"
        )
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)

    assert run("third_party_kl:Third").stdout == "third\n"
    broken = run("third_party_kl:Missing")
    assert broken.returncode != 0
    assert "entry point 'third' = 'third_party_kl:Missing'" in broken.stderr
