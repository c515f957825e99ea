"""tests/oracle.py against numbers worked by hand, and against the lab, which was written apart from it."""

import math
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from kl_plugins.lab import TabularPolicy, token_coefficients

head_reference = runpy.run_path(str(Path(__file__).parents[1] / "support" / "oracle.py"))["head_reference"]

LOGP, OLD, REF = [[-1.0, -2.0]], [[-1.5, -1.9]], [[-1.2, -2.4]]


def flat(matrix):
    return matrix.flatten().tolist()


def test_worked_example():
    value, gradient = head_reference(LOGP, REF, [[1, 1]], OLD, report="k3", correction="clip")
    assert flat(gradient) == pytest.approx([0.329744, 0.361935], abs=5e-7)
    rho = [math.exp(0.5), math.exp(-0.1)]
    assert flat(value) == pytest.approx([rho[0] * 0.0187308, rho[1] * 0.0703200], abs=5e-8 * 2)
    assert float(value.mean()) == pytest.approx(0.0472550, abs=5e-8)
    value, _ = head_reference(LOGP, REF, [[1, 1]], OLD, estimator="k3", correction="is", ratio="sequence")
    assert float(value.mean()) == pytest.approx(0.0664, abs=5e-5)
    _, gradient = head_reference([[-1.0]], [[-1.2]], [[1]], [[-0.5]], correction="clip")
    assert flat(gradient) == [0.0]


def test_numbers_that_must_survive():
    value, gradient = head_reference([[-4.0, -120.0]], [[-1.0, -1.0]], estimator="k3")
    assert flat(value)[0] == pytest.approx(math.exp(3) - 4, abs=1e-12)
    assert flat(gradient)[0] == pytest.approx(1 - math.exp(3), abs=1e-12)
    assert math.isfinite(flat(value)[1])
    assert flat(gradient)[1] == pytest.approx(-math.expm1(20))
    value, gradient = head_reference([[-1.0, -1e10]], [[-1.5, math.nan]], [[1, 0]], estimator="k3")
    assert flat(value) == pytest.approx([0.1065307, 0], abs=5e-8)
    assert flat(gradient) == pytest.approx([1 - math.exp(-0.5), 0])
    assert flat(head_reference(LOGP, None)[1]) == [0, 0]


def test_report_one_descend_another():
    value, gradient = head_reference([[-1.0]], [[-2.0]], report="k3", estimator="k2")
    assert (flat(value), flat(gradient)) == (pytest.approx([math.exp(-1)]), [1.0])


def test_credit_over_a_gap():
    rows = [[-1.0, -2.0, -0.5, -1.0]], [[-1.3, -1.5, -0.9, -1.0]], [[1, 1, 0, 1]]
    assert flat(head_reference(*rows, credit="return")[1]) == pytest.approx([-0.2, -0.5, 0, 0])
    assert flat(head_reference(*rows, credit="sequence")[1]) == pytest.approx([-0.2, -0.2, 0, -0.2])


def test_weights_cap_and_bound():
    value, gradient = head_reference(LOGP, REF, None, OLD, [[2.0, 0.5]], correction="is", ratio_cap=1.5)
    assert flat(value) == pytest.approx([1.5 * 2 * 0.02, math.exp(-0.1) * 0.5 * 0.08])
    assert flat(gradient) == pytest.approx([1.5 * 2 * 0.2, math.exp(-0.1) * 0.5 * 0.4])
    _, gradient = head_reference(LOGP, REF, coefficient_bound=0.1)
    assert flat(gradient) == pytest.approx([0.1 * math.tanh(2), 0.1 * math.tanh(4)])


def test_clip_looks_at_the_credited_coefficient():
    # c = (-.1, .5): token 0 alone may be clipped above; credited with its future (+.4) it may not, at ρ = e^.5 > 1.2.
    rows = dict(logp=[[-1.0, -1.0]], ref_logp=[[-0.9, -1.5]], mask=None, old_logp=[[-1.5, -1.0]], correction="clip")
    assert flat(head_reference(**rows)[1]) == pytest.approx([0, 0.5])
    assert flat(head_reference(**rows, credit="return")[1]) == pytest.approx([0.4 * math.exp(0.5), 0.5])


@dataclass
class Cell:
    estimator: str
    correction: str
    ratio: str
    credit: str
    placement: str = "loss"
    form: str = "decoupled"
    clip_low: float = 0.1
    clip_high: float = 0.3
    ratio_cap: float = 1.4


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "mse", "none"])
@pytest.mark.parametrize("correction", ["none", "is", "clip"])
def test_oracle_and_lab_agree(estimator, correction):
    policy = TabularPolicy.random(3, 3, seed=11)
    reference, behaviour = policy.near(0.8, seed=12), policy.near(0.4, seed=13)
    logp, ref_logp, old_logp = (p.logp(policy.responses()).detach() for p in (policy, reference, behaviour))
    for ratio in ("token", "sequence"):
        for credit in ("token", "return", "sequence"):
            cell = Cell(estimator, correction, ratio, credit)
            axes = {name: getattr(cell, name) for name in vars(cell) if name not in ("placement", "form")}
            _, gradient = head_reference(logp, ref_logp, None, old_logp, **axes)
            lab = token_coefficients(cell, policy, reference, behaviour)
            torch.testing.assert_close(gradient, lab, rtol=1e-12, atol=1e-13)


def test_values_are_those_of_their_definitions():
    logp, ref_logp = [[-0.5, -3.0]], [[-1.0, -2.0]]
    pi, ref = [math.exp(-0.5), math.exp(-3)], [math.exp(-1), math.exp(-2)]
    for estimator, expected in {
        "k1": [0.5, -1],
        "none": [0.5, -1],
        "k2": [0.125, 0.5],
        "k3": [math.exp(-0.5) - 0.5, math.e - 2],
        "mse": [(p - r) ** 2 / (2 * p) for p, r in zip(pi, ref, strict=True)],
    }.items():
        assert flat(head_reference(logp, ref_logp, estimator=estimator)[0]) == pytest.approx(expected)
