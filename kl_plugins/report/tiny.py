"""Noise of the KL gradient of a real, if tiny, language model: the CPU demo's, measured over groups of responses.

The policy is the reference with noise on its weights; responses are its own samples. What is measured is the package's
own head and exact KL, on logits, differentiated to all parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kl_plugins import KLConfig, kl_head
from kl_plugins.exact import kl_from_logits, kl_from_topk

QUESTIONS, GROUPS, GROUP = ("3+4=", "17+8=", "29+29=", "11+12="), 32, 8
LENGTH, TOP = 3, 4  # an answer is two digits and the end
BASELINE = ", less the others' mean"


@dataclass(frozen=True)
class Drawn:
    """Responses to one question, ``[n, T]``, and both models' logits there; ``mask`` ends with the answer."""

    tokens: Tensor
    mask: Tensor
    logits: Tensor  # [n, T, V], carries the gradient
    ref_logits: Tensor

    @property
    def group(self) -> int:
        """n."""
        return len(self.tokens)

    def logp(self) -> tuple[Tensor, Tensor]:
        """Both models' log-probabilities of the tokens."""
        pair = (x.log_softmax(-1).gather(-1, self.tokens[..., None])[..., 0] for x in (self.logits, self.ref_logits))
        return tuple(pair)


def sampled(config: KLConfig, baseline: bool = False) -> Callable[[Drawn], Tensor]:
    """The head's loss of a group, its mean over responses; each coefficient less the others' mean where asked for."""

    def loss(drawn: Drawn) -> Tensor:
        logp, ref_logp = drawn.logp()
        if not baseline:
            return kl_head(logp, ref_logp, mask=drawn.mask, config=config).sum() / drawn.group
        leaf = logp.detach().requires_grad_()
        (c,) = torch.autograd.grad(kl_head(leaf, ref_logp, mask=drawn.mask, config=config).sum(), leaf)
        others = (c.sum(0) - c) / (drawn.group - 1)  # a response that ended has nothing to come: 0
        return ((c - others) * drawn.mask * logp).sum() / drawn.group

    return loss


def top(k: int) -> Callable[[Drawn], Tensor]:
    """`kl_from_topk` with the policy's k likeliest tokens."""

    def loss(drawn: Drawn) -> Tensor:
        logp, ref_logp = drawn.logp()
        ids = drawn.logits.topk(k, dim=-1).indices
        columns = [x.log_softmax(-1).gather(-1, ids) for x in (drawn.logits, drawn.ref_logits)]
        kl = kl_from_topk(
            columns[0], ids, columns[1], labels=drawn.tokens, logp=logp, ref_logp=ref_logp, mask=drawn.mask
        )
        return kl.sum() / drawn.group

    return loss


def exact(drawn: Drawn) -> Tensor:
    """`kl_from_logits`, reverse."""
    return kl_from_logits(drawn.logits, drawn.ref_logits, token_weights=drawn.mask / drawn.group).loss


TOKEN = {"k2": sampled(KLConfig("k2")), "k3": sampled(KLConfig("k3")), f"top {TOP}": top(TOP), "exact": exact}
RESPONSE = {
    "k1 in reward, return": sampled(KLConfig("k1", placement="reward", credit="return")),
    "k1 in reward, return" + BASELINE: sampled(KLConfig("k1", placement="reward", credit="return"), baseline=True),
    "k2, sequence": sampled(KLConfig("k2", credit="sequence")),
    "k2, sequence" + BASELINE: sampled(KLConfig("k2", credit="sequence"), baseline=True),
}


def noise(directory: Path, spread: float) -> tuple[float, dict[str, float]]:
    """KL per token of policy and reference, nats, and the noise of every gradient, as one response has it.

    ``directory`` is where `kl_plugins.cpu.addition` keeps the model. ``spread`` scales the noise on the weights. Noise
    is the standard deviation of the gradient over the norm of its mean, each question's draws compared among
    themselves: sqrt(GROUP * trace of the covariance of a group's gradient) / norm, both averaged over questions.
    """
    tokenizer, reference = _load(directory)
    draw = torch.Generator().manual_seed(0)
    policy = copy.deepcopy(reference)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(spread * parameter.std() * torch.randn(parameter.shape, generator=draw))
    losses, parameters, kl = {**TOKEN, **RESPONSE}, list(policy.parameters()), []
    variance, square = dict.fromkeys(losses, 0.0), dict.fromkeys(losses, 0.0)
    for question in QUESTIONS:
        prompt = tokenizer(question, return_tensors="pt").input_ids.expand(GROUP, -1)
        total, squares = dict.fromkeys(losses, 0.0), dict.fromkeys(losses, 0.0)
        for _ in range(GROUPS):
            drawn = _draw(policy, reference, prompt, tokenizer.eos_token_id, draw)
            kl.append(float(exact(drawn).detach()) * GROUP / float(drawn.mask.sum()))
            for name, loss in losses.items():
                gradient = torch.autograd.grad(loss(drawn), parameters, retain_graph=True)
                flat = torch.cat([g.flatten() for g in gradient]).double()
                total[name] = total[name] + flat
                squares[name] += float(flat.square().sum())
        for name in losses:
            mean = float((total[name] / GROUPS).square().sum())
            covariance = (squares[name] - GROUPS * mean) / (GROUPS - 1)
            variance[name] += covariance
            square[name] += mean - covariance / GROUPS  # unbiased for the square of the true mean
    return sum(kl) / len(kl), {name: math.sqrt(GROUP * variance[name] / square[name]) for name in losses}


def _load(directory: Path) -> tuple[Any, Any]:
    """The demo's tokenizer and model, without the progress bars of files this small."""
    from transformers import AutoTokenizer, Qwen2ForCausalLM
    from transformers.utils import logging

    from kl_plugins.cpu import addition

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        path = addition.prepare(directory) / "model"
        return AutoTokenizer.from_pretrained(path), Qwen2ForCausalLM.from_pretrained(path)
    finally:
        if shown:
            logging.enable_progress_bar()


def _draw(policy, reference, prompt: Tensor, end: int, draw: torch.Generator) -> Drawn:
    tokens = prompt
    with torch.no_grad():
        for _ in range(LENGTH):
            logits = policy(tokens).logits[:, -1]
            tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1, generator=draw)], 1)
    answer, start = tokens[:, prompt.shape[1] :], prompt.shape[1] - 1
    before = torch.nn.functional.pad((answer == end).cumsum(-1)[:, :-1], (1, 0))
    logits = policy(tokens[:, :-1]).logits[:, start:]
    with torch.no_grad():
        ref_logits = reference(tokens[:, :-1]).logits[:, start:]
    return Drawn(answer, before == 0, logits, ref_logits)
