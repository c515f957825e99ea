import pytest

pytest.importorskip("math_verify", reason="needs math-verify (the extra `math`)")

from kl_plugins.data import reward
from kl_plugins.launch.plan import package_folder

RIGHT, WRONG = "<think>twice 21</think>\\boxed{42}", "<think>twice 21</think>\\boxed{43}"


@pytest.fixture(scope="module", autouse=True)
def end_workers():
    yield
    reward._graders.close()


@pytest.mark.parametrize(
    ("response", "accuracy", "form"),
    [
        (RIGHT, 1, 1),
        (WRONG, 0, 1),
        ("It is \\boxed{42}.", 1, 0),
        ("It is 42.", 0, 0),
        ("<think>\\boxed{42}</think>\\boxed{43}", 0, 1),  # the answer counts, not the thought
        ("<think>\\boxed{42}", 1, 0),
    ],
)
def test_verl(response, accuracy, form):
    result = reward.compute_score("any", response, "42", {"index": 0}, more="ignored")
    assert result == {"score": accuracy + form, "acc": accuracy, "format": form, "undecided": 0}
    assert all(isinstance(value, float) for value in result.values())


def test_undecided_is_wrong_and_counted(monkeypatch):
    graders = reward.Graders(1, 2.0)
    monkeypatch.setattr(reward, "_graders", graders)
    result = reward.compute_score("any", "<think>x</think>\\boxed{9^{9^{9^{9}}}}", "42")
    assert result == {"score": 1.0, "acc": 0.0, "format": 1.0, "undecided": 1.0}
    graders.close()


def test_openrlhf():
    prompts = ["<|im_start|>user\nShow \\boxed{42}<|im_end|>\n<|im_start|>assistant\n"] * 2
    queries = [prompts[0] + RIGHT + "<|im_end|>", prompts[1] + "\\boxed{43}<|im_end|>"]
    result = reward.reward_func(queries, prompts, ["42", "42"], images=None)
    assert result["rewards"].tolist() == [2.0, 0.0]
    assert result["scores"].tolist() == [1.0, 0.0]
    assert {name: value.tolist() for name, value in result["extra_logs"].items()} == {
        "acc": [1.0, 0.0],
        "format": [1.0, 0.0],
        "undecided": [0.0, 0.0],
    }


def test_a_cut_prompt_is_an_error_and_no_reward():
    """Otherwise the prompt's own example of the format would be graded."""
    with pytest.raises(ValueError, match=r"does not start with its prompt.*Raise data\.max_len"):
        reward.reward_func(["end of the prompt" + RIGHT], ["start and end of the prompt"], ["42"])


def test_openrlhf_loads_it_by_its_path():
    """OpenRLHF executes the file under another name, outside the package."""
    if package_folder("openrlhf") is None:
        pytest.skip("needs OpenRLHF's environment")
    from openrlhf.utils.agent import SingleTurnAgentExecutor

    executor = SingleTurnAgentExecutor([reward.__file__])
    result = executor.reward_func(["Q" + RIGHT], ["Q"], ["42"])
    assert result["rewards"].tolist() == [2.0]
