import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

OURS = (
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
)


@dataclass
class Run:
    """What a `kl-plugins run` left."""

    code: int
    shown: str
    out: Path

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]

    @property
    def config(self) -> dict:
        return yaml.safe_load((self.out / "config.yaml").read_text())

    def check(self, steps: int) -> None:
        """It trained all steps with our KL, from the reference on and away from it."""
        assert self.code == 0, self.shown
        rows = self.rows
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        for row in rows:
            assert [name for name in OURS if not isinstance(row.get(f"kl/{name}"), float)] == []
            assert all(isinstance(row[name], float) for name in ("reward", "kl", "pg_loss", "seconds"))
            assert 0 <= row["reward"] <= 1
        # The policy that sampled the batch of step 1 is the reference; the later ones are not, and of 128 responses
        # the estimate is within some .01 of its mean.
        assert abs(rows[0]["kl/sampled"]) < 1e-3
        assert max(row["kl/sampled"] for row in rows[1:]) > 0.005
        assert rows[-1]["kl/k2"] > rows[0]["kl/k2"]
        assert rows[-1]["kl/coef_mean"] > 0
        assert (self.out / "report.png").stat().st_size > 10_000


@pytest.fixture
def kl_run(tmp_path):
    """Runs the command to its end: ``kl_run("verl/grpo_k2", "--steps", 3)``."""

    def run(*words, env=None) -> Run:
        out = tmp_path / "run"
        argv = [sys.executable, "-m", "kl_plugins.cli", "run", *map(str, words), "--out", str(out)]
        done = subprocess.run(
            [*argv, "--timeout", "800"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=850
        )
        return Run(done.returncode, done.stdout + done.stderr, out)

    return run
