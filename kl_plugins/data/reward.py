"""The reward of the real-model recipes: 1 for the right answer plus 1 for the format, as verl and OpenRLHF call it.

verl:      reward.custom_reward_function.path=pkg://kl_plugins.data.reward
OpenRLHF:  --reward.remote_url /…/kl_plugins/data/reward.py     (in a recipe: pkg://kl_plugins.data.reward)

A comparison that is not decided in time counts as wrong, and is counted under "undecided".
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from kl_plugins.data.answers import answer_of, has_format
from kl_plugins.data.grader import Graders

if importlib.util.find_spec("math_verify") is None:
    # Now, while the framework loads its reward: OpenRLHF goes on without a reward if the function itself raises.
    raise ImportError("kl_plugins.data.reward needs math-verify: pip install 'kl-plugins[math]'")

_graders = Graders()


def _fresh_graders() -> None:
    global _graders
    _graders = Graders()


# A forked process would read its parent's answers from the pipes that both hold.
os.register_at_fork(after_in_child=_fresh_graders)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    """verl's custom reward function.

    Returns:
        ``score``, the reward: ``acc`` + ``format``, each 0 or 1; ``undecided`` is 1 where the grader gave up.
    """
    equal = _graders.equal(ground_truth, answer_of(solution_str))
    accuracy, form = float(equal is True), float(has_format(solution_str))
    return {"score": accuracy + form, "acc": accuracy, "format": form, "undecided": float(equal is None)}


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: Any) -> dict[str, Any]:
    """OpenRLHF's reward function over a list of samples; ``scores`` is the accuracy alone.

    Args:
        queries: prompt and response as one text, special tokens included.
        prompts: the prompts alone.
        labels: the right answers.

    Raises:
        ValueError: a query does not start with its prompt.
    """
    import torch

    results = []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        if not query.startswith(prompt):
            # The response cannot be told from the prompt, whose own text shows the format.
            raise ValueError(
                f"a query does not start with its prompt (…{prompt[-40:]!r}): OpenRLHF cut it to fit data.max_len, or "
                "the tokenizer does not give its text back. Raise data.max_len, or run kl-plugins prepare with a lower "
                "--prompt-tokens"
            )
        results.append(compute_score("", query.removeprefix(prompt), label))
    columns = {key: torch.tensor([r[key] for r in results]) for key in ("score", "acc", "format", "undecided")}
    return {"rewards": columns.pop("score"), "scores": columns["acc"], "extra_logs": columns}
