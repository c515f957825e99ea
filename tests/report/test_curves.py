"""Figures: the data are what they say, and every format renders."""

import itertools
import math

import pytest
import torch

from kl_plugins import KLConfig, KLEstimator, estimators, lab, register_estimator, registered_estimators
from kl_plugins.report import curves, tiny


def series(panel):
    return {s.name: dict(zip((round(x, 6) for x in s.x), s.y, strict=True)) for s in panel.series}


def test_coefficients_are_of_every_registered_estimator(monkeypatch):
    monkeypatch.setattr(estimators, "_REGISTRY", dict(estimators._REGISTRY))  # leave no trace

    @register_estimator("test_of_curves")
    class Mine(KLEstimator):
        def value(self, logp, ref_logp):
            return torch.full_like(logp, 7.0)

        def coefficient(self, logp, ref_logp):
            return torch.full_like(logp, 5.0)

    values, slopes = map(series, curves.panels("coefficients"))
    assert set(values) == set(slopes) == set(registered_estimators())
    assert set(values["test_of_curves"].values()) == {7.0}
    assert set(slopes["test_of_curves"].values()) == {5.0}
    assert (values["k1"][2.0], values["k2"][2.0]) == (2, 2)
    assert values["k3"][-1.0] == pytest.approx(math.e - 2)
    assert (slopes["k1"][-3.0], slopes["k2"][-3.0], slopes["none"][-3.0]) == (1, -3, 0)
    assert slopes["k3"][2.0] == pytest.approx(1 - math.exp(-2))
    # Both are probabilities: log pi = -1, log pi_ref = -3.
    assert slopes["mse"][2.0] == pytest.approx(math.exp(-1) - math.exp(-3))


def test_tails():
    trap, far = curves.panels("tails")
    names = [s.name for s in trap.series]
    assert names[:2] == ["k2: −log δ", "k3: 1 − δ"]
    two, three, gap = (s.y for s in trap.series)
    assert [a - b for a, b in zip(two, three, strict=True)] == pytest.approx(gap)
    assert min(gap) >= 0
    data = series(far)
    assert data["k2"][-15.0] == -15
    assert data["k3"][-15.0] == pytest.approx(1 - math.exp(15))
    for name in data.keys() - {"k2", "k3"}:  # the installed framework's own
        assert data[name][-15.0] == 0
        assert data[name][1.0] == pytest.approx(data["k3"][1.0], abs=1e-6)


def test_values_show_the_heavy_tail():
    heavy, light = curves.panels("values")
    assert heavy.level[0] == pytest.approx(1.1344, abs=1e-4)
    k1, k3 = (s.y for s in heavy.series)
    assert k3[len(k3) // 2] < 0.7 * heavy.level[0] < 2 * heavy.level[0] < k3[-1]
    assert max(abs(y - heavy.level[0]) for y in k1) < 0.1
    k1, k3 = (s.y for s in light.series)
    assert max(k3) - min(k3) < max(k1) - min(k1)  # where the variance is finite, k3 is the better value


def test_variance():
    token, response, spread, *model = curves.panels("variance")
    data = {s.name: s.y for s in token.series}
    assert all(2 * e < k for e, k in zip(data["exact"], data["k2"], strict=True))
    pulls = {s.name: s.y for s in response.series}
    assert list(pulls) == list(tiny.RESPONSE)
    assert all(a > b for a, b in zip(pulls["k1 in reward, return"], data["k2"], strict=True))
    k2, chi2 = (s.y for s in spread.series)
    sigmas = spread.series[0].x
    assert all(math.isinf(y) == (s <= math.sqrt(0.5)) for s, y in zip(sigmas, chi2, strict=True))
    assert all(math.isfinite(y) for y in k2)
    of_model = {s.name: s.y for panel in model for s in panel.series}
    assert list(of_model) == [*tiny.TOKEN, *tiny.RESPONSE]
    assert all(3 * e < k for e, k in zip(of_model["exact"], of_model["k2"], strict=True))


def _every_group(loss, policy, reference, group):
    """Mean and variance of a group's gradient over all groups of responses, by enumeration."""
    responses = policy.responses()
    states, p = policy.states(responses), policy.response_probabilities()
    mean, square = 0.0, 0.0
    for members in itertools.product(range(len(p)), repeat=group):
        rows = list(members)
        mask = torch.ones_like(responses[rows], dtype=torch.bool)
        drawn = tiny.Drawn(responses[rows], mask, policy.logits[states[rows]], reference.logits.detach()[states[rows]])
        gradient = torch.autograd.grad(loss(drawn), policy.logits)[0].flatten()
        mean, square = mean + p[rows].prod() * gradient, square + p[rows].prod() * gradient.square().sum()
    return mean, float(square - mean.square().sum())


@pytest.mark.parametrize("name", [*tiny.TOKEN, *tiny.RESPONSE])
def test_the_models_losses_have_the_labs_moments(name):
    """The losses that are measured on the language model, on a policy that can be enumerated, groups of two."""
    policy = lab.TabularPolicy.random(tiny.TOP, 2, seed=1)
    reference = policy.near(0.9, seed=2)
    mean, variance = _every_group({**tiny.TOKEN, **tiny.RESPONSE}[name], policy, reference, 2)
    plain = name.removesuffix(tiny.BASELINE)
    if name in ("exact", f"top {tiny.TOP}"):  # the k are all there are
        expected = lab.moments(lab.topk_gradients(policy, reference, tiny.TOP), policy)
    else:
        configs = {
            "k2": KLConfig("k2"),
            "k3": KLConfig("k3"),
            "k1 in reward, return": KLConfig("k1", placement="reward", credit="return"),
            "k2, sequence": KLConfig("k2", credit="sequence"),
        }
        coefficients = lab.token_coefficients(configs[plain], policy, reference)
        if plain == name:
            expected = lab.gradient_moments(coefficients, policy)
        else:
            expected = lab.leave_one_out_moments(coefficients, policy, 2)
    torch.testing.assert_close(mean, expected[0], rtol=0, atol=1e-12)
    assert 2 * variance == pytest.approx(expected[1], rel=1e-9)


def test_credit():
    error, noise = ({s.name: s.y for s in panel.series} for panel in curves.panels("credit"))
    assert max(error["k2, return"] + error["k2, sequence"]) < 1e-9
    assert error["k2, token"][0] < 1e-9  # one token: no future to leave out
    assert all(y > 5 for y in error["k2, token"][1:])
    assert noise["k2, token"][-1] < noise["k2, return"][-1] < noise["k2, sequence"][-1]


@pytest.mark.parametrize("suffix", curves.FORMATS)
def test_renders(tmp_path, suffix):
    path = tmp_path / "new" / f"figure{suffix}"
    drawn = curves.panels("coefficients")
    curves.save(drawn, path)
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm", b"%PDF")
    if suffix == ".svg":  # text is paths in an svg: check what was drawn on the axes instead
        from matplotlib.figure import Figure

        axes = Figure().subplots()
        curves._draw(axes, drawn[0])
        assert [text.get_text() for text in axes.get_legend().get_texts()] == [s.name for s in drawn[0].series]
        dashes = {str(line.get_linestyle()) + str(line._unscaled_dash_pattern) for line in axes.get_lines()[:5]}
        assert len(dashes) == 5  # told apart without colour


def test_command(tmp_path):
    from typer.testing import CliRunner

    from kl_plugins.cli import app

    path = tmp_path / "credit.svg"
    result = CliRunner().invoke(app, ["plot", "credit", "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert path.exists()
    assert "k2, return           0         0         0         0         0         0" in result.output
    for words, said in (
        (["plot", "tales", "-o", "x.png"], "no figure 'tales'"),
        (["plot", "credit", "-o", "x.gif"], ".svg"),
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2
        assert said in result.output
