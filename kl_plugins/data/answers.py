"""What a response has to look like, asked for in the system prompt and read back by regular expression.

The paper (https://arxiv.org/abs/2510.01555) has a format reward by regular expression and an accuracy reward; the
wording of both is ours. The format is that of the traces in OpenR1-Math-220k: a thought, then an answer.
"""

from __future__ import annotations

import re

SYSTEM_PROMPT = (
    "You solve mathematical problems. First think step by step, between <think> and </think>. "
    "Then write the solution, with the final result in \\boxed{}."
)

_PLAIN = r"(?:(?!</?think>).)*"  # text without either tag; linear in its length
_FORMAT = re.compile(rf"\s*<think>(?P<thought>{_PLAIN})</think>(?P<answer>{_PLAIN})", re.DOTALL)


def has_format(response: str) -> bool:
    """One thought in its tags, and after it, and nowhere else, an answer with something boxed."""
    match = _FORMAT.fullmatch(response)
    return match is not None and bool(match["thought"].strip()) and "\\boxed{" in match["answer"]


def answer_of(response: str) -> str:
    """What is to be graded: all that follows the last thought, or everything if there is none."""
    return response.rpartition("</think>")[2]
