import sys

import pytest

from kl_plugins.report import compare as c
from kl_plugins.report.compare import ReportError, compare, load_runs

torch_writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter  # what both frameworks write with

VERL = {
    "critic/score/mean": 0.4,
    "actor/kl_loss": 0.01,
    "actor/pg_loss": 0.002,
    "timing_s/step": 9.0,
    "actor/entropy": 0.5,
    "response_length/mean": 200.0,
    "actor/kl_coef": 0.001,
    "actor/pg_clipfrac": 0.1,
}
OPENRLHF = {
    "train/rollout/reward_mean": 0.3,
    "train/reward": 0.29,
    "train/kl": 0.02,
    "train/logprobs_diff": 0.03,
    "train/policy_loss": 0.001,
    "train/timing/step_total": 7.0,
    "train/entropy_loss": 0.6,
    "train/rollout/response_length_mean": 150.0,
    "train/ppo_clip_ratio": 0.2,
    "eval/eval_default_pass1": 0.5,
}


def write(folder, scalars, steps=(1, 2, 3)):
    with torch_writer(str(folder)) as writer:
        for step in steps:
            for name, value in scalars.items():
                writer.add_scalar(name, value * step, step)
        writer.add_text("train/generated_samples", "a text", 1)
    return folder


def test_both_frameworks_under_the_same_names(tmp_path):
    verl, openrlhf = load_runs([write(tmp_path / "v", VERL), write(tmp_path / "o" / "ppo_1201T03:17", OPENRLHF).parent])
    values = {q.slug: (verl.series(q)[1], openrlhf.series(q)[1]) for q in c.QUANTITIES if verl.has(q)}
    expected = {
        "reward": (0.8, 0.6),
        "kl": (0.02, 0.04),
        "entropy": (1.0, 1.2),
        "length": (400, 300),
        "clip_share": (0.2, 0.4),
        "seconds": (18, 14),
    }
    for slug, pair in expected.items():
        assert values[slug] == pytest.approx(pair), slug
    assert openrlhf.series(c.K1)[1] == pytest.approx(0.06)
    assert (verl.name, openrlhf.name, verl.steps) == ("v", "o", [1, 2, 3])
    assert "read from TensorBoard's event files" in verl.notes
    assert compare([verl, openrlhf]).axis is c.LOGGED


def test_beside_one_of_ours(tmp_path, made_up_run):
    both = compare(load_runs([made_up_run(tmp_path / "ours", 3), write(tmp_path / "theirs", VERL)]))
    assert both.axis is c.LOGGED
    assert both.at_step(both.runs[1], c.REWARD, 2) == pytest.approx(0.8)


def test_not_finite(tmp_path):
    (run,) = load_runs([write(tmp_path / "a", VERL | {"actor/entropy": float("nan"), "actor/kl_coef": float("inf")})])
    assert not run.has(next(q for q in c.QUANTITIES if q.slug == "entropy"))


def test_resumed_and_cut(tmp_path):
    """A second file goes on from step 3; the first loses its end."""
    folder = write(tmp_path / "a", VERL, steps=range(1, 6))
    (first,) = folder.iterdir()
    first = first.rename(folder / "events.out.tfevents.1.host.1.0")
    first.write_bytes(first.read_bytes()[:-30])
    write(folder, VERL | {"critic/score/mean": 0.5}, steps=range(3, 8))
    (run,) = load_runs([folder])
    assert run.steps == [1, 2, 3, 4, 5, 6, 7]
    assert run.series(c.REWARD)[1:3] == pytest.approx([0.8, 1.5])


def test_more_than_tensorboards_usual_number_of_points(tmp_path):
    """TensorBoard keeps a sample of long series unless it is told not to."""
    (run,) = load_runs([write(tmp_path / "a", {"critic/score/mean": 1.0}, steps=range(1, 12001))])
    assert run.steps == list(range(1, 12001))


def test_refusals(tmp_path, monkeypatch):
    several = tmp_path / "several"
    for name in ("a", "b"):
        write(several / name, VERL)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "events.out.tfevents.1").write_bytes(b"not an event")
    with pytest.raises(ReportError, match="event files of 2 runs: name each by its own folder") as caught:
        load_runs([several, tmp_path / "torn"])
    assert "torn: no scalar in its event files" in str(caught.value)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(ReportError, match="which is not installed: pip install tensorboard"):
        load_runs([several / "a"])
