import pytest

from kl_plugins.data.answers import SYSTEM_PROMPT, answer_of, has_format


@pytest.mark.parametrize(
    ("response", "good"),
    [
        ("<think>twice 21</think>The result is \\boxed{42}.", True),
        ("\n<think>\ntwice\n21\n</think>\n\\boxed{42}<|im_end|>", True),
        ("<think>maybe \\boxed{41}</think> no, \\boxed{42}", True),
        ("<think>twice 21</think>The result is 42.", False),  # nothing boxed
        ("<think>it is \\boxed{42}</think>42", False),  # boxed in the thought alone
        ("<think> </think>\\boxed{42}", False),  # no thought
        ("twice 21 <think>x</think>\\boxed{42}", False),  # text before
        ("twice 21 </think>\\boxed{42}", False),
        ("<think>twice 21 \\boxed{42}", False),
        ("<think>a</think>b</think>\\boxed{42}", False),
        ("<think>a</think>\\boxed{42}<think>b", False),
        ("<think><think>a</think>\\boxed{42}", False),
        (SYSTEM_PROMPT, False),
        ("", False),
    ],
)
def test_format(response, good):
    assert has_format(response) is good


def test_format_takes_time_in_proportion():
    """A pattern that backtracks over pairs of tags and boxes would never end here."""
    assert not has_format("<think>" + "a\\boxed{1}" * 100_000 + "</think>" * 2)
    assert not has_format("<think>a</think>" + "\\boxed{1} " * 100_000 + "<think>")
    assert not has_format("<think>" * 100_000)


def test_answer():
    assert answer_of("<think>1</think>2") == "2"
    assert answer_of("<think>1</think>2</think>3") == "3"
    assert answer_of("no tags") == "no tags"
