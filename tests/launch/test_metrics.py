import json

import pytest

from kl_plugins.launch.metrics import JsonLines, Recorder, read_rows, regularised_by_us, step_row

NAMES = {"reward": ("score", "rewards"), "kl": ("kl/k3",), "pg_loss": ("pg",), "seconds": ("t",)}


def test_lines_come_once_and_whole(tmp_path):
    lines = JsonLines(tmp_path / "m")
    assert lines.poll() == []
    with open(tmp_path / "m", "w") as file:
        file.write('{"step": 1}\n{"st')
        file.flush()
        assert lines.poll() == [{"step": 1}]
        assert lines.poll() == []
        file.write('ep": 2}\n')
        file.flush()
        assert lines.poll() == [{"step": 2}]


def test_row_takes_the_first_name_that_is_there():
    row = step_row({"step": 3, "rewards": 0.5, "kl/k3": float("nan"), "pg": 1, "other": 2.0, "text": "x"}, NAMES)
    assert row == {
        "step": 3,
        "reward": 0.5,
        "kl": None,
        "pg_loss": 1.0,
        "seconds": None,
        "rewards": 0.5,
        "kl/k3": None,
        "pg": 1.0,
        "other": 2.0,
        "text": "x",
    }


def test_recorder_writes_all_and_counts_steps(tmp_path):
    records = [[{"step": 0, "val/acc": 0.1}], [], [{"step": 1, "pg": 0.0, "score": 1}, {"step": 2, "pg": 0.5}]]
    recorder = Recorder(lambda: records.pop(0), NAMES, tmp_path / "metrics.jsonl")
    assert [len(recorder.new_rows()) for _ in range(3)] == [0, 0, 2]
    assert [row["step"] for row in recorder.rows] == [1, 2]
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in written] == [0, 1, 2]
    assert read_rows(tmp_path / "metrics.jsonl") == recorder.rows


@pytest.mark.parametrize(
    ("rows", "ours"), [([], False), ([{"a": 1, "kl/k1": 0.0}], True), ([{"kl/k1": 0.0}, {"a": 1}], False)]
)
def test_steps_of_ours(rows, ours):
    assert regularised_by_us(rows) is ours
