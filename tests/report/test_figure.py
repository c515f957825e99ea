import math

import pytest
from matplotlib.image import imread

from kl_plugins.report.figure import running_mean, save_figure


def rows(n, **extra):
    return [
        {
            "step": i + 1,
            "reward": 0.3 + 0.01 * i,
            "kl/sampled": 0.001 * i,
            "pg_loss": 0.0,
            "kl/coef_mean": 0.02 * i,
            **extra,
        }
        for i in range(n)
    ]


def ink(path) -> float:
    return float((imread(path)[..., :3].mean(axis=-1) < 0.9).mean())


@pytest.mark.parametrize("n", [1, 4, 200])
def test_a_picture_with_something_in_it(tmp_path, n):
    save_figure(rows(n), tmp_path / "report.png", "verl/grpo_k2: k2 as loss descends reverse KL")
    assert ink(tmp_path / "report.png") > 0.005


def test_missing_numbers_leave_gaps(tmp_path):
    data = rows(6)
    data[2]["kl/sampled"] = None
    for row in data:
        del row["kl/coef_mean"]
    save_figure(data, tmp_path / "a.png")
    save_figure(rows(6), tmp_path / "b.png")
    assert imread(tmp_path / "a.png").shape[0] < imread(tmp_path / "b.png").shape[0]  # a panel less


def test_two_runs_differ(tmp_path):
    save_figure(rows(6), tmp_path / "a.png")
    save_figure([row | {"reward": 1 - row["reward"]} for row in rows(6)], tmp_path / "b.png")
    assert (imread(tmp_path / "a.png") != imread(tmp_path / "b.png")).any()


def test_no_rows(tmp_path):
    with pytest.raises(ValueError, match="no step to draw"):
        save_figure([], tmp_path / "report.png")


def test_running_mean():
    assert running_mean([1, 3, math.nan, 5], 1) == [2, 2, 4, 5]
    assert math.isnan(running_mean([math.nan], 3)[0])
