import json
import math

import pytest

from kl_plugins.report import compare as c
from kl_plugins.report.compare import ReportError, compare, load_runs

REWARD, SAMPLED = c.REWARD, c.SAMPLED


def line(steps, kl, reward, **extra):
    """Rows with these numbers and nothing else."""
    zipped = zip(steps, kl, reward, strict=True)
    return [{"step": s, "reward": r, "kl": k, "pg_loss": 0.0, "kl/sampled": k, **extra} for s, k, r in zipped]


@pytest.fixture
def run(tmp_path, made_up_run):
    return lambda name, *args, **kwargs: made_up_run(tmp_path / name, *args, **kwargs)


def by_slug(slug):
    return next(q for q in c.QUANTITIES if q.slug == slug)


# Alignment


def test_aligned_by_kl_and_by_step_they_differ(run):
    """B gets as much reward for half the KL and in twice the steps: the two alignments say opposite things."""
    fast = line([1, 2, 3], [0.0, 0.2, 0.4], [0.0, 0.5, 1.0])
    thrifty = line([1, 2, 3, 4, 5], [0.0, 0.05, 0.1, 0.15, 0.2], [0.0, 0.25, 0.5, 0.75, 1.0])
    both = compare(load_runs([run("fast", fast), run("thrifty", thrifty)]))
    a, b = both.runs
    assert both.axis is SAMPLED
    assert (both.at_step(a, REWARD, 2), both.at_step(b, REWARD, 2)) == (0.5, 0.25)
    assert both.at_kl(a, REWARD, 0.1) == pytest.approx(0.25)
    assert both.at_kl(b, REWARD, 0.1) == pytest.approx(0.5)
    assert both.step_levels() == [1, 2, 3]
    assert both.kl_levels() == [0.05, 0.1, 0.2]


def test_kl_counts_when_it_is_first_reached(run):
    rows = line([1, 2, 3, 4], [0.0, 0.3, 0.1, 0.4], [0.0, 0.6, 0.2, 0.8])
    both = compare(load_runs([run("a", rows)]))
    assert both.at_kl(both.runs[0], REWARD, 0.15) == pytest.approx(0.3)
    assert math.isnan(both.at_kl(both.runs[0], REWARD, 0.5))  # never reached: nothing is extrapolated


def test_a_run_that_starts_above_has_no_reward_at_that_kl(run):
    both = compare(load_runs([run("a", line([1, 2], [0.3, 0.5], [0.1, 0.2]))]))
    assert math.isnan(both.at_kl(both.runs[0], REWARD, 0.2))
    assert both.at_kl(both.runs[0], REWARD, 0.3) == 0.1


def test_one_short_run_does_not_spoil_the_levels(run):
    many = compare(load_runs([run("a", 40), run("b", 30, seed=1), run("c", 1), run("d", 20, "none")]))
    assert many.step_levels()[-1] == 30
    assert many.kl_levels()[-1] > 0.1
    assert math.isnan(many.at_step(many.runs[2], REWARD, 30))


def test_levels_are_reached(run):
    """Two digits, rounded down: 0.0299… must not become a level of 0.03 that the run does not get to."""
    both = compare(load_runs([run("a", line([1, 2], [0.0, 0.029999], [0.0, 1.0]))]))
    assert both.kl_levels()[-1] == 0.029
    assert c._two_digits(0.03) == 0.03
    assert c._two_digits(1234.0) == 1200
    assert c._two_digits(9.99e-7) == 9.9e-7


def test_smoothing_by_hand(run):
    rows = line(range(1, 13), [0.0] * 12, [0, 3, 0, 3, 0, 3, 0, 3, 0, 3, 0, 3])
    (only,) = load_runs([run("a", rows)])
    assert only.reach == 1
    assert only.smooth(REWARD)[1:4] == [1, 2, 1]
    assert only.ends(REWARD) == (1.5, 1.5)
    (short,) = load_runs([run("b", rows[:9])])
    assert short.smooth(REWARD) == short.series(REWARD)


# Which KL is on the axis


def test_the_axis_is_a_kl_that_all_have(run, made_up):
    older = [{k: v for k, v in row.items() if k != "kl/sampled"} for row in made_up()]
    alone = made_up(ours=False)
    assert compare(load_runs([run("a", 5), run("b", 5)])).axis is SAMPLED
    with_older = compare(load_runs([run("c", 5), run("d", older)]))
    assert with_older.axis is c.K3
    assert "kl/sampled" in with_older.notes[0]
    mixed = compare(load_runs([run("e", 5), run("f", alone)]))
    assert mixed.axis is c.LOGGED
    assert "different estimators" in mixed.notes[0]


def test_a_run_without_kl_is_left_out_of_kl_and_said_so(run, made_up):
    none = [{**row, "kl": None} for row in made_up(ours=False)]
    both = compare(load_runs([run("a", 5), run("b", none)]))
    assert both.axis is SAMPLED
    assert [r.letter for r in both.with_kl] == ["A"]
    assert any("not in what is aligned by KL" in note for note in both.runs[1].notes)
    alone = compare(load_runs([run("c", none)]))
    assert alone.axis is None
    assert alone.kl_levels() == []
    assert "no run has a kl" in alone.notes[0].lower()


def test_openrlhf_without_a_reference_has_no_kl(run):
    """At beta 0 OpenRLHF logs exact zeros for what it does not compute."""
    rows = [{"step": s, "reward": 0.1, "kl": 0.0, "logprobs_diff": 0.0, "pg_loss": 0.0} for s in (1, 2, 3)]
    assert compare(load_runs([run("a", rows)])).axis is None
    measured = [{**row, "kl": 0.01 * row["step"], "logprobs_diff": 0.02 * row["step"]} for row in rows]
    assert compare(load_runs([run("b", measured)])).axis is c.K1


# Files


def test_numbers_that_are_none(run, made_up):
    """NaN, infinities, text, nothing, too large for a float: each is a gap, and is counted."""
    rows = made_up(10)
    bad = [math.nan, math.inf, -math.inf, "0.5", None, 10**400, True, [1], 1e300]
    for row, value in zip(rows, bad, strict=False):
        row["reward"] = value
    both = compare(load_runs([run("a", rows)]))
    (only,) = both.runs
    assert [math.isnan(v) for v in only.series(REWARD)] == [True] * 9 + [False]
    assert any(note.startswith("reward: no finite number at 9 of 10 steps") for note in only.notes)


def test_a_file_that_is_being_written(run):
    path = run("a", 6)
    file = path / "metrics.jsonl"
    file.write_text(file.read_text()[:-40])
    (only,) = load_runs([path])
    assert only.steps == [1, 2, 3, 4, 5]
    assert only.notes == ["the last line is cut and left out"]


def test_lines_that_are_no_steps(run):
    path = run("a", 4)
    file = path / "metrics.jsonl"
    junk = ["nonsense", "[1, 2]", '{"reward": 1}', '{"step": 1.5}', '{"step": "2"}', '{"step": NaN}', '{"step": true}']
    lines = file.read_text().splitlines()
    deep = "[" * 100_000
    file.write_text("\n".join([*lines[:2], *junk, deep, "", *lines[2:]]) + "\n")
    (only,) = load_runs([path])
    assert only.steps == [1, 2, 3, 4]
    assert only.notes == ["left out as no step: line 3, 4, 5, 6, 7, …"]


def test_validation_is_no_step_and_the_last_of_a_step_counts(run):
    rows = line([1, 2, 2, 3], [0.0] * 4, [0.1, 0.2, 0.9, 0.3])
    rows.insert(0, {"step": 0, "reward": None, "kl": None, "pg_loss": None, "seconds": None, "val-core/acc": 0.5})
    (only,) = load_runs([run("a", rows[::-1])])
    assert only.steps == [1, 2, 3]
    assert only.series(REWARD) == [0.1, 0.2, 0.3]  # the file is backwards: 0.2 was written last
    assert only.notes == ["2 rows that are no training step, or of a step written again"]


def test_a_run_by_its_file(run):
    path = run("a", 3)
    (only,) = load_runs([path / "metrics.jsonl"])
    assert (only.name, only.path, only.setting) == ("a", path, "k2 in the loss, clip")


def test_missing_quantities_are_said(run, made_up):
    both = compare(load_runs([run("a", 5), run("b", made_up(5, ours=False))]))
    assert any("has no" in note and "coefficient, mean" in note for note in both.runs[1].notes)
    assert both.runs[0].notes == []
    assert by_slug("coef_max") in both.quantities
    assert by_slug("k2") in both.quantities


@pytest.mark.parametrize("rows", [1, 2, 9, 10, 2000])
def test_any_length(run, rows):
    both = compare(load_runs([run("a", rows)]))
    assert len(both.runs[0].smooth(REWARD)) == rows
    assert both.step_levels()[-1] == rows


# Settings and names


def test_setting_in_words():
    block = {"estimator": "k2", "placement": "loss", "form": "decoupled", "correction": "none", "credit": "token"}
    assert c.setting_of({"kl": block}) == "k2 in the loss"
    assert c.setting_of({"kl": block | {"placement": "reward", "estimator": "k1"}}) == "k1 in the reward"
    assert c.setting_of({"kl": block | {"form": "combined", "correction": "is"}}) == "k2 in the advantage, is"
    assert c.setting_of({"kl": block | {"credit": "return", "ratio": "sequence"}}) == "k2 in the loss, return, sequence"
    assert c.setting_of({"kl": ["k2"]}) == c.setting_of({}) == c.setting_of({"kl": {"estimator": ["k2"]}}) == ""


def test_openrlhfs_beta_is_in_its_config(run, made_up):
    rows = [{k: v for k, v in row.items() if k != "actor/kl_coef"} for row in made_up(3)]
    beta = by_slug("beta")
    fixed, moving = run("a", rows), run("b", rows)
    (fixed / "config.yaml").write_text("algo: {kl: {init_coef: 0.02}}\n")
    (moving / "config.yaml").write_text("algo: {kl: {init_coef: 0.02, target: 6.0}}\n")
    runs = load_runs([fixed, moving])
    assert runs[0].series(beta) == [0.02] * 3
    assert not runs[1].has(beta)  # a controller moves it, and nobody logged where to


def test_a_config_that_is_no_yaml(run):
    path = run("a", 3)
    (path / "config.yaml").write_text("kl: {estimator: !!python/object:os.system {}}\n")
    (only,) = load_runs([path])
    assert only.setting == ""
    assert only.notes == ["config.yaml is no readable YAML: the setting is left out"]


def test_runs_of_one_name_are_told_apart_by_their_parents(run):
    paths = [run("mon/seed1/out", 2), run("tue/seed1/out", 2), run("tue/seed2/out", 2), run("other", 2)]
    assert [r.name for r in load_runs(paths)] == ["mon/seed1/out", "tue/seed1/out", "seed2/out", "other"]
    assert [r.letter for r in load_runs(paths)] == ["A", "B", "C", "D"]


def test_a_name_that_plays_tricks(run):
    (only,) = load_runs([run("a\x1b[31m\u202eb\nc", 2)])
    assert only.name == "a\ufffd[31m\ufffdb\ufffdc"


# Refusals


def test_all_that_is_wrong_at_once(run, tmp_path):
    good, empty, hollow, unfinished = run("good", 2), tmp_path / "empty", run("hollow", []), run("unfinished", 2)
    empty.mkdir()
    (unfinished / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": None, "pg_loss": None}) + "\n")
    with pytest.raises(ReportError) as caught:
        load_runs([good, empty, tmp_path / "gone", hollow, unfinished, good / ".." / "good"])
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert lines[0].startswith(f"{empty} holds no run: expected metrics.jsonl")
    assert lines[1].startswith(f"{tmp_path / 'gone'} does not exist")
    assert lines[2].startswith(f"{hollow}: no training step in metrics.jsonl")
    assert lines[3].startswith(f"{unfinished}: no training step")
    assert lines[4].endswith("is given twice: name each run once")


def test_none_and_too_many(tmp_path):
    with pytest.raises(ReportError, match="no run given"):
        load_runs([])
    with pytest.raises(ReportError, match="27 runs in one report"):
        load_runs([tmp_path / str(i) for i in range(27)])


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(bytes(range(256)) * 20)
    with pytest.raises(ReportError, match="no training step"):
        load_runs([tmp_path])
