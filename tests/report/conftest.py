"""Made-up runs, for the tests of reports: the shapes are those of real ones, the numbers are not."""

import json
import math
import random
from pathlib import Path

import pytest

PULLS = {"k1": 1.9, "k2": 1.0, "k3": 1.25, "none": 2.6}  # how far the KL gets under each estimator


def verl_row(step: int, progress: float, kl: float, noise: random.Random) -> dict:
    """A row as verl's plugin leaves it in ``metrics.jsonl``, at `progress` from 0 to 1."""
    return {
        "step": step,
        "reward": 0.3 + 0.42 * (1 - math.exp(-3 * progress)) - 0.02 * kl + noise.gauss(0, 0.015),
        "kl": kl,
        "pg_loss": noise.gauss(0, 0.003),
        "seconds": 4.1 + noise.gauss(0, 0.2),
        "actor/entropy": 0.45 - 0.16 * progress + noise.gauss(0, 0.004),
        "actor/pg_clipfrac": 0.1 + noise.gauss(0, 0.01),
        "actor/kl_coef": 0.01,
        "response_length/mean": 180 + 60 * progress + noise.gauss(0, 4),
    }


def own_metrics(kl: float, noise: random.Random) -> dict:
    up, down = abs(noise.gauss(0.02, 0.004)), abs(noise.gauss(0.03, 0.006))
    return {
        "kl/sampled": kl,
        "kl/k1": 0.9 * kl + noise.gauss(0, 0.004),
        "kl/k2": 0.8 * kl + abs(noise.gauss(0, 0.004)),
        "kl/k3": 1.1 * kl + abs(noise.gauss(0, 0.01)),
        "kl/coef_mean": 0.3 + 0.6 * kl + noise.gauss(0, 0.02),
        "kl/coef_max": 4 + abs(noise.gauss(0, 1.5)),
        "kl/tail_up": up * kl,
        "kl/tail_down": down * kl,
        "kl/clip_removed": abs(noise.gauss(0.04, 0.01)),
    }


def made_up_rows(steps: int = 20, estimator: str = "k2", seed: int = 0, ours: bool = True) -> list[dict]:
    noise = random.Random(seed)
    rows = []
    for step in range(1, steps + 1):
        progress = (step - 1) / max(steps - 1, 1)
        kl = PULLS[estimator] * 0.12 * progress**1.3 + abs(noise.gauss(0, 0.002)) * (step > 1)
        rows.append(verl_row(step, progress, kl, noise) | (own_metrics(kl, noise) if ours else {}))
    return rows


def write_run(folder: Path, rows: list[dict] | int, estimator: str = "k2", seed: int = 0, ours: bool = True) -> Path:
    if isinstance(rows, int):
        rows = made_up_rows(rows, estimator, seed, ours)
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    block = f"estimator: {estimator}, placement: loss, form: decoupled, correction: clip, credit: token"
    (folder / "config.yaml").write_text(f"kl: {{{block}}}\n" if ours else "algorithm: {adv_estimator: grpo}\n")
    return folder


@pytest.fixture(scope="session")
def made_up():
    """``made_up(steps, estimator, seed, ours)``: rows of a run; without `ours`, of verl alone."""
    return made_up_rows


@pytest.fixture(scope="session")
def few():
    """``few(steps, seed=0)``: rows with so few quantities that a page of them is quick to draw."""
    names = ("step", "reward", "kl", "pg_loss", "kl/sampled")
    return lambda steps, seed=0: [{name: row[name] for name in names} for row in made_up_rows(steps, seed=seed)]


@pytest.fixture(scope="session")
def made_up_run():
    """``made_up_run(folder, rows or their number, estimator, seed, ours)`` writes a run's folder and returns it."""
    return write_run
