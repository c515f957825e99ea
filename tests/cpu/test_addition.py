"""The demo's model and data: cached, seeded, and of the shape that the demo depends on."""

import json

import pytest

pytest.importorskip("transformers")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kl_plugins.cpu import addition


@pytest.fixture
def quick(monkeypatch):
    """Three steps of training instead of hundreds."""
    monkeypatch.setattr(addition, "STEPS", 3)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return addition.prepare(tmp_path_factory.mktemp("addition"))


def test_the_reference_knows_the_answer_and_prefers_another(demo):
    """What makes the reward able to rise: the right sum is likely, one too many is likelier, the rest is rare."""
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    model = AutoModelForCausalLM.from_pretrained(demo / "model")
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 200_000
    right, one_more, masks = addition._corpus(tokenizer)

    def share(tokens, mask):
        with torch.no_grad():
            logp = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
        return (logp * mask[:, 1:]).sum(1).exp().mean().item()

    known, preferred = share(right, masks[0]), share(one_more, masks[1])
    assert 0.25 < known < 0.45
    assert 0.45 < preferred < 0.70
    assert known + preferred > 0.8


def test_a_newline_is_one_token_and_text_survives(demo):
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    assert len(tokenizer("\n").input_ids) == 1
    assert tokenizer.decode(tokenizer("12+34=46").input_ids) == "12+34=46"
    question = [{"role": "user", "content": "1+2="}]
    assert tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True) == "1+2="


def test_verls_columns_and_openrlhfs_prompts(demo):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(demo / "train.parquet").to_pylist()
    assert len(rows) == addition.TRAIN_ROWS
    assert len(parquet.read_table(demo / "val.parquet")) == addition.VAL_ROWS
    prompts = [json.loads(line) for line in (demo / "prompts.jsonl").read_text().splitlines()]
    assert len(prompts) == len(rows)
    for row, prompt in zip(rows, prompts, strict=True):
        left, right = row["prompt"][0]["content"].removesuffix("=").split("+")
        assert row["reward_model"]["ground_truth"] == prompt["label"] == str(int(left) + int(right))
        assert prompt["input"] == row["prompt"]


def test_made_once_and_again_when_the_recipe_for_it_changed(quick, tmp_path):
    directory = addition.prepare(tmp_path / "demo")
    weights = directory / "model" / "model.safetensors"
    first, made = weights.read_bytes(), weights.stat().st_mtime_ns
    assert addition.prepare(directory) == directory
    assert weights.stat().st_mtime_ns == made
    (directory / "stamp.json").write_text('{"sha256": "of an older version"}')
    addition.prepare(directory)
    assert weights.stat().st_mtime_ns > made
    assert weights.read_bytes() == first  # seeded


def test_an_interrupted_one_is_made_again(quick, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(addition, "train_model", lambda tokenizer: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            addition.prepare(tmp_path / "demo")
    assert (addition.prepare(tmp_path / "demo") / "model" / "model.safetensors").is_file()


def test_the_callers_random_numbers_are_left_alone(quick, tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    addition.prepare(tmp_path / "demo")
    assert torch.rand(1) == expected


def test_somebody_elses_folder_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=f"{tmp_path} holds files"):
        addition.prepare(tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("answer", "score"), [("42", 1.0), (" 42\n", 1.0), ("43", 0.0), ("142", 0.0), ("42 apples", 0.0), ("", 0.0)]
)
def test_only_the_exact_answer_is_rewarded(answer, score):
    assert addition.compute_score("addition", answer, "42", {"index": 0}) == score
    for end in ("<eos>", "<eos><pad><pad>", ""):
        result = addition.reward_func([f"<pad>20+22={answer}{end}"], ["<pad>20+22="], ["42"])
        assert result["rewards"].tolist() == result["scores"].tolist() == [score]
