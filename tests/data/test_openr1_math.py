import json

import pyarrow.parquet
import pytest
import typer
from typer.testing import CliRunner

from kl_plugins.data.answers import SYSTEM_PROMPT
from kl_plugins.data.cli import prepare as prepare_command
from kl_plugins.data.openr1_math import Settings, prepare
from kl_plugins.launch.plan import package_folder

GOOD = (100, True, True)
FILES = ("train.parquet", "train.jsonl", "val.parquet", "val.jsonl")


def row(number, *traces, answer="42", problem=None, **more):
    """One row of OpenR1-Math-220k; a trace is (letters, complete, verified)."""
    return {
        "uuid": f"id-{number}",
        "problem": problem or f"Problem {number}?",
        "solution": "not used",
        "answer": answer,
        "generations": ["t" * letters for letters, _, _ in traces],
        "is_reasoning_complete": [complete for _, complete, _ in traces],
        "correctness_math_verify": [verified for _, _, verified in traces],
        **more,
    }


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """One token a byte, so that the tests' lengths are letters."""
    from kl_plugins.cpu.addition import make_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def source(tmp_path):
    """``source(rows, "x.jsonl")``: a local copy of the data set."""

    def write(rows, name="rows.parquet"):
        import pyarrow
        import pyarrow.parquet

        path = tmp_path / name
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return path

    return write


def settings(tokenizer, **more):
    return Settings(tokenizer=tokenizer, **{"trace_tokens": 100, "prompt_tokens": 300, "val_rows": 0, **more})


def problems(folder, part="train"):
    return [line["prompt"][1]["content"] for line in pyarrow.parquet.read_table(folder / f"{part}.parquet").to_pylist()]


def test_which_rows_stay(tmp_path, tokenizer, source):
    rows = [
        row(0, GOOD),
        row(1, (101, True, True)),  # one token too long
        row(2, (10, True, False)),  # wrong answer
        row(3, (10, False, True)),  # cut off
        row(4, (500, True, True), (20, True, False), (90, True, True)),  # the third will do
        row(5),  # no trace at all
        row(6, GOOD, answer="  "),
        row(7, GOOD, answer=None),
        row(8, GOOD, problem="p" * 300),
        row(
            9, GOOD, (10, True, True), correctness_math_verify=[True]
        ),  # fewer marks than traces: the second is unmarked
    ]
    summary = prepare(tmp_path / "out", settings(tokenizer), source(rows))
    assert problems(tmp_path / "out") == ["Problem 0?", "Problem 4?", "Problem 9?"]
    assert summary["rows"] == {
        "read": 10,
        "trace too long": 1,
        "without a verified trace": 3,
        "without an answer": 2,
        "prompt too long": 1,
    }
    table = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [line["extra_info"]["trace_tokens"] for line in table] == [100, 90, 100]


def test_columns(tmp_path, tokenizer, source):
    prepare(tmp_path / "out", settings(tokenizer), source([row(0, GOOD, answer="\\frac{1}{2}")]))
    chat = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": "Problem 0?"}]
    assert pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist() == [
        {
            "data_source": "open-r1/OpenR1-Math-220k",
            "ability": "math",
            "prompt": chat,
            "reward_model": {"style": "rule", "ground_truth": "\\frac{1}{2}"},
            "extra_info": {"index": 0, "uuid": "id-0", "trace_tokens": 100},
        }
    ]
    [line] = (tmp_path / "out" / "train.jsonl").read_text().splitlines()
    assert json.loads(line) == {"input": chat, "label": "\\frac{1}{2}"}


def test_same_source_same_files(tmp_path, tokenizer, source):
    rows = [row(i, (i, True, True), answer=f"ü{i}") for i in range(40)]
    copies = [source(rows, "a.parquet"), source(rows, "b.jsonl"), source(rows, "c.parquet")]
    for i, copy in enumerate(copies):
        prepare(tmp_path / str(i), settings(tokenizer, val_rows=5), copy)
    for name in FILES:
        first, second, third = ((tmp_path / str(i) / name).read_bytes() for i in range(3))
        assert first == second == third, name


def test_validation_is_held_out_by_problem(tmp_path, tokenizer, source):
    rows = [row(i, GOOD) for i in range(30)]
    prepare(tmp_path / "a", settings(tokenizer, val_rows=6), source(rows))
    prepare(tmp_path / "b", settings(tokenizer, val_rows=6), source(rows[::-1], "reversed.parquet"))
    train, val = problems(tmp_path / "a"), problems(tmp_path / "a", "val")
    assert (len(train), len(val)) == (24, 6)
    assert sorted(train + val) == sorted(r["problem"] for r in rows)
    assert train == [r["problem"] for r in rows if r["problem"] in train]  # in the source's order
    assert val != [r["problem"] for r in rows[:6]]
    assert set(problems(tmp_path / "b", "val")) == set(val)


def test_limit(tmp_path, tokenizer, source):
    rows = [row(i, GOOD if i % 2 else (500, True, True)) for i in range(20)]
    summary = prepare(tmp_path / "out", settings(tokenizer, limit=3), source(rows))
    assert problems(tmp_path / "out") == ["Problem 1?", "Problem 3?", "Problem 5?"]
    assert summary["train"] == 3
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary


def test_verl_reads_it(tmp_path, tokenizer, source):
    if package_folder("verl") is None:
        pytest.skip("needs verl's environment")
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.utils.dataset.rl_dataset import RLHFDataset

    prepare(tmp_path / "out", settings(tokenizer), source([row(i, GOOD) for i in range(4)]))
    config = OmegaConf.create({"max_prompt_length": 300, "filter_overlong_prompts": True, "cache_dir": str(tmp_path)})
    data = RLHFDataset(
        str(tmp_path / "out" / "train.parquet"), tokenizer=AutoTokenizer.from_pretrained(tokenizer), config=config
    )
    assert len(data) == 4
    assert data[0]["reward_model"]["ground_truth"] == "42"
    assert data[0]["raw_prompt"][0]["content"] == SYSTEM_PROMPT


def test_openrlhf_reads_it(tmp_path, tokenizer, source):
    if package_folder("openrlhf") is None:
        pytest.skip("needs OpenRLHF's environment")
    import datasets
    from openrlhf.datasets.prompts_dataset import preprocess_data
    from transformers import AutoTokenizer

    prepare(tmp_path / "out", settings(tokenizer), source([row(0, GOOD)]))
    [line] = datasets.load_dataset(
        "json", data_files=str(tmp_path / "out" / "train.jsonl"), split="train", cache_dir=str(tmp_path)
    )
    template = AutoTokenizer.from_pretrained(tokenizer).apply_chat_template
    prompt, label = preprocess_data(line, None, "input", "label", template)
    assert (prompt, label) == (SYSTEM_PROMPT + "Problem 0?", "42")


@pytest.fixture
def command(tokenizer):
    app = typer.Typer()
    app.command()(prepare_command)
    return lambda *words: CliRunner().invoke(app, [*map(str, words), "--tokenizer", tokenizer])


def test_command(tmp_path, command, source):
    rows = source([row(i, (9000 if i == 0 else 2048, True, True)) for i in range(131)])
    result = command("openr1-math", "--out", tmp_path / "out", "--from", rows)
    assert result.exit_code == 0, result.output
    assert "2 problems to train on, 128 to validate on" in result.output
    assert "of 131 read, 1 trace too long" in result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted([*FILES, "summary.json"])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("data set", "unknown data set 'openr1-maths': known: openr1-math"),
        ("folder", "is not empty: name another folder"),
        ("file", "no such file"),
        ("suffix", "the name has to end in .parquet"),
        ("column", "lacks the column generations, correctness_math_verify"),
        ("rows", "1 rows are left of"),
        ("template", "has no chat template"),
    ],
)
def test_refused(tmp_path, command, source, tokenizer, broken, message):
    out, rows, name = tmp_path / "out", [row(0, GOOD)], "rows.parquet"
    words = ["openr1-math"]
    if broken == "data set":
        words = ["openr1-maths"]
    if broken == "folder":
        out.mkdir()
        (out / "mine").touch()
    if broken == "suffix":
        name = "rows.csv"
    if broken == "column":
        rows = [{k: v for k, v in rows[0].items() if k not in ("generations", "correctness_math_verify")}]
    if broken == "template":
        from transformers import AutoTokenizer

        plain = AutoTokenizer.from_pretrained(tokenizer)
        plain.chat_template = None
        plain.save_pretrained(tmp_path / "plain")
    path = tmp_path / "nowhere.parquet" if broken == "file" else source(rows, name)
    # The fixture gives --tokenizer last; the last of two counts.
    app = typer.Typer()
    app.command()(prepare_command)
    used = str(tmp_path / "plain") if broken == "template" else tokenizer
    result = CliRunner().invoke(app, [*words, "--out", str(out), "--from", str(path), "--tokenizer", used])
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split()), result.output
    assert not (out / "summary.json").exists()
