"""Exact KL against naive autograd in float64, at the edges, and against the sampled estimators it replaces."""

import itertools
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from naive import divergence, log_probabilities, naive

from kl_plugins import KLConfig, kl_head
from kl_plugins.exact import DIRECTIONS, kl_from_hidden, kl_from_logits, kl_from_topk

B, T, H, H_REF, V = 3, 7, 6, 5, 37


def models(dtype=torch.float64, seed=0):
    """(hidden, weight, ref_hidden, ref_weight), the first two as leaves."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return draw(B, T, H).requires_grad_(), draw(V, H).requires_grad_(), draw(B, T, H_REF), draw(V, H_REF)


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual, expected, atol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


LABELS = torch.arange(B * T).reshape(B, T) * 5 % V


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"bias": True},
        {"softcap": 3.0},
        {"softcap": 3.0, "temperature": 1.3, "bias": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_against_naive_autograd(direction, settings, chunk):
    leaves = models()
    if settings.get("bias"):
        settings = {**settings, "bias": draw(V).requires_grad_(), "ref_bias": draw(V, seed=2)}
    wanted = [*leaves[:2], settings["bias"]] if "bias" in settings else leaves[:2]
    kl, logp, ref_logp = naive(*leaves, direction, **settings)
    out = kl_from_hidden(*leaves, labels=LABELS, chunk=chunk, direction=direction, **settings)
    close(out.kl, kl)
    close(out.loss, kl.sum())
    close(out.logp, logp.gather(-1, LABELS.unsqueeze(-1)).squeeze(-1))
    close(out.ref_logp, ref_logp.gather(-1, LABELS.unsqueeze(-1)).squeeze(-1))
    close(torch.autograd.grad(2.5 * out.loss, wanted), torch.autograd.grad(2.5 * kl.sum(), wanted))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_weights_and_token_loss_in_the_same_pass(direction):
    """The whole loss of an actor: PPO's clipped objective beside the KL, ignored positions left out."""
    leaves = models()
    labels = LABELS.clone()
    labels[0, 2:5] = labels[2, 6] = -100
    counts = labels != -100
    weights, advantages = draw(B, T, seed=3).square() / counts.sum(), draw(B, T, seed=4)
    kl, logp, _ = naive(*leaves, direction, temperature=0.8)
    logp = logp.gather(-1, LABELS.unsqueeze(-1)).squeeze(-1)
    old_logp = logp.detach() + 0.3 * draw(B, T, seed=5)

    def ppo(logp, positions):
        ratio = (logp - old_logp.flatten()[positions]).exp()
        a = advantages.flatten()[positions]
        return -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a) / 15

    seen = []

    def token_loss(logp, positions):
        seen.extend(positions.tolist())
        return ppo(logp, positions)

    slow = torch.where(counts, weights * kl + ppo(logp.flatten(), torch.arange(B * T)).reshape(B, T), 0.0).sum()
    arguments = dict(labels=labels, token_weights=weights, temperature=0.8, direction=direction, chunk=5)
    out = kl_from_hidden(*leaves, token_loss=token_loss, **arguments)
    close(out.loss, slow)
    assert sorted(seen) == counts.flatten().nonzero().flatten().tolist()
    close(out.kl, torch.where(counts, kl, 0.0))
    close(out.logp, torch.where(counts, logp, 0.0))
    close(torch.autograd.grad(out.loss, leaves[:2]), torch.autograd.grad(slow, leaves[:2]))
    with torch.no_grad():
        assert kl_from_hidden(*leaves, token_loss=ppo, **arguments).loss.item() == pytest.approx(slow.item(), abs=1e-10)


def test_ignored_positions_may_hold_anything():
    leaves = models()
    labels = LABELS.clone()
    labels[1, 3], labels[2, 0] = -1, -1
    dirty = [x.detach().clone() for x in leaves]
    dirty[0][1, 3], dirty[2][2, 0] = math.nan, math.inf
    dirty = [x.requires_grad_(i < 2) for i, x in enumerate(dirty)]
    clean_out, out = (kl_from_hidden(*x, labels=labels, ignore_index=-1) for x in (leaves, dirty))
    assert torch.equal(out.kl, clean_out.kl)
    assert out.kl[1, 3] == out.logp[1, 3] == 0
    clean_out.loss.backward()
    out.loss.backward()
    assert torch.equal(dirty[1].grad, leaves[1].grad)
    assert torch.equal(dirty[0].grad, leaves[0].grad)
    assert (dirty[0].grad[1, 3] == 0).all()


def test_no_position_counts():
    leaves = models()
    out = kl_from_hidden(*leaves, labels=torch.full((B, T), -100))
    out.loss.backward()
    assert out.loss == 0
    assert (out.kl == 0).all()
    assert (leaves[0].grad == 0).all()
    assert (leaves[1].grad == 0).all()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vocabulary_excluded_in_both(direction, dtype):
    leaves = models(dtype)
    bias = torch.zeros(V, dtype=dtype)
    bias[[0, 5, V - 1]] = -math.inf
    keep = torch.isfinite(bias)
    out = kl_from_hidden(*leaves, bias=bias, ref_bias=bias, direction=direction)
    kl, _, _ = naive(*(x.double() if i % 2 == 0 else x.double()[keep] for i, x in enumerate(leaves)), direction)
    close(out.kl.double(), kl, 1e-10 if dtype == torch.float64 else 1e-5)
    gradient, slow = torch.autograd.grad(out.loss, leaves[1])[0], torch.autograd.grad(kl.sum(), leaves[1])[0]
    assert (gradient[~keep] == 0).all()
    close(gradient.double(), slow.double(), 1e-10 if dtype == torch.float64 else 1e-4)


def test_vocabulary_excluded_in_one():
    """KL(a || b) is infinite where only b excludes a token, and finite where only a does."""
    leaves = models()
    bias = torch.zeros(V, dtype=torch.float64)
    bias[3] = -math.inf
    assert (kl_from_hidden(*leaves, ref_bias=bias).kl == math.inf).all()
    assert (kl_from_hidden(*leaves, bias=bias, direction="forward").kl == math.inf).all()
    for arguments in ({"bias": bias}, {"ref_bias": bias, "direction": "forward"}):
        out = kl_from_hidden(*leaves, **arguments)
        kl, _, _ = naive(*leaves, **{"direction": "reverse", **arguments})
        close(out.kl, kl)
        close(torch.autograd.grad(out.loss, leaves[:2]), torch.autograd.grad(kl.sum(), leaves[:2]))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_far_logits(direction):
    """Logits of thousands: one-hot policies on different tokens; finite in float32, and right."""
    logits = torch.tensor([[5000.0, 0.0, -5000.0], [0.0, 5000.0, 0.0]], requires_grad=True)
    ref_logits = torch.tensor([[0.0, 5000.0, 0.0], [0.0, 5000.0, 0.0]])
    out = kl_from_logits(logits, ref_logits, direction=direction)
    close(out.kl, torch.tensor([1.0, 0.0] if direction == "mse" else [5000.0, 0.0]), 0)
    out.loss.backward()
    expected = [-1.0, 1.0] if direction == "forward" else [0.0, 0.0]
    close(logits.grad[0, :2].abs(), torch.tensor(expected).abs(), 0)
    assert (logits.grad[1] == 0).all()


def test_equal_models_have_exactly_no_kl_and_no_gradient():
    hidden, weight, _, _ = models(torch.float32)
    for direction in DIRECTIONS:
        out = kl_from_hidden(hidden, weight, hidden, weight, direction=direction)
        assert (out.kl == 0).all()
        for gradient in torch.autograd.grad(out.loss, (hidden, weight)):
            assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-7), (torch.float16, 2**-10)]
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_half_precision_against_float64_on_the_same_numbers(dtype, tolerance, direction):
    """Tolerance relative to the largest entry: the arithmetic is float32, only the gradient is rounded at the end."""
    leaves = models(dtype)
    exact = [x.detach().double().requires_grad_(i < 2) for i, x in enumerate(leaves)]
    kl, logp, _ = naive(*exact, direction)
    out = kl_from_hidden(*leaves, labels=LABELS, direction=direction)
    assert out.kl.dtype == torch.float32
    close(out.kl.double(), kl, 1e-5 * max(1, kl.max().item()))
    close(out.logp.double(), logp.gather(-1, LABELS.unsqueeze(-1)).squeeze(-1), 1e-5)
    gradients, slow = torch.autograd.grad(out.loss, leaves[:2]), torch.autograd.grad(kl.sum(), exact[:2])
    for gradient, expected in zip(gradients, slow, strict=True):
        assert gradient.dtype == dtype
        close(gradient.double(), expected, tolerance * expected.abs().max().item())


def test_gradient_goes_where_it_is_asked_for():
    hidden, weight, ref_hidden, ref_weight = models()
    ref_hidden, ref_weight = ref_hidden.requires_grad_(), ref_weight.requires_grad_()
    kl_from_hidden(hidden, weight.detach(), ref_hidden, ref_weight).loss.backward()
    assert hidden.grad is not None
    assert ref_hidden.grad is ref_weight.grad is None
    hidden.grad = None
    kl_from_hidden(hidden.detach(), weight, ref_hidden, ref_weight).loss.backward()
    assert weight.grad is not None
    out = kl_from_hidden(hidden, weight, ref_hidden, ref_weight, labels=LABELS)
    assert not any(x.requires_grad for x in (out.kl, out.logp, out.ref_logp))
    with torch.no_grad():
        evaluated = kl_from_hidden(hidden, weight, ref_hidden, ref_weight)
    assert not evaluated.loss.requires_grad
    assert evaluated.logp is evaluated.ref_logp is None
    close(evaluated.kl, out.kl, 0)


def test_nothing_of_the_size_of_the_logits_is_kept():
    leaves = models()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = kl_from_hidden(*leaves, labels=LABELS)
    held = [g.numel() for g in out.loss.grad_fn.gradients if g is not None]
    assert sorted(held) == sorted([B * T * H, V * H])
    assert max([0, *kept]) <= B * T * H


def test_a_second_backward_is_refused():
    leaves = models()
    loss = kl_from_hidden(*leaves).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call backward once"):
        loss.backward()


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_from_logits(direction, dtype):
    logits, ref_logits = (3 * draw(B, T, V, seed=s).to(dtype) for s in (6, 7))
    logits[..., 2] = ref_logits[..., 2] = -math.inf
    before = logits.clone(), ref_logits.clone()
    logits.requires_grad_()
    weights = draw(B, T, seed=8).square()
    out = kl_from_logits(
        logits, ref_logits, labels=LABELS.clamp(min=3), direction=direction, temperature=0.6, token_weights=weights,
        token_loss=lambda logp, positions: logp.square(), chunk=4,
    )  # fmt: skip
    leaf = logits.detach().double().requires_grad_()
    logp, ref_logp = log_probabilities(leaf, 0.6), log_probabilities(ref_logits.double(), 0.6)
    kl = divergence(logp, ref_logp, direction)
    slow = (weights * kl).sum() + logp.gather(-1, LABELS.clamp(min=3).unsqueeze(-1)).square().sum()
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    close(out.loss.double(), slow, tolerance * max(1, slow.item()))
    close(out.kl.double(), kl, tolerance)
    gradient, expected = torch.autograd.grad(out.loss, logits)[0], torch.autograd.grad(slow, leaf)[0]
    assert gradient.dtype == dtype
    rounding = 2**-7 if dtype == torch.bfloat16 else tolerance  # in forward, and again when scaled in backward
    close(gradient.double(), expected, rounding * expected.abs().max().item())
    assert torch.equal(logits.detach(), before[0])
    assert torch.equal(ref_logits, before[1])


@pytest.mark.parametrize(("direction", "estimator"), [("reverse", "k2"), ("forward", "k3"), ("mse", "mse")])
def test_is_what_the_sampled_head_estimates(direction, estimator):
    """The gradient is the mean of kl_head's over every token that could be drawn."""
    logits, ref_logits = draw(V, seed=9).requires_grad_(), draw(V, seed=10)
    logp = logits.log_softmax(-1).unsqueeze(-1)  # [B=V, T=1], every token drawn once
    m = kl_head(
        logp, ref_logits.log_softmax(-1).unsqueeze(-1), mask=torch.ones(V, 1), config=KLConfig(estimator=estimator)
    )
    sampled = torch.autograd.grad((logp.detach().exp() * m).sum(), logits)[0]
    exact = torch.autograd.grad(kl_from_logits(logits, ref_logits, direction=direction).loss, logits)[0]
    close(exact, sampled)


def topk_inputs(k, logits, ref_logits, labels):
    logp, ref_logp = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    ids = ref_logp.topk(k, dim=-1).indices
    return dict(
        topk_logp=logp.gather(-1, ids),
        topk_ids=ids,
        ref_topk_logp=ref_logp.gather(-1, ids),
        labels=labels,
        logp=logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1),
        ref_logp=ref_logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1),
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("k", "off_policy"), list(itertools.product([0, 3, V], [False, True])))
def test_topk_is_unbiased(direction, k, off_policy):
    """Mean over every token that could be drawn: the exact value and the exact gradient, for any k."""
    logits, ref_logits = draw(V, seed=11).requires_grad_(), draw(V, seed=12)
    old = (logits.detach() + (draw(V, seed=13) if off_policy else 0)).log_softmax(-1)
    every = torch.arange(V)
    inputs = topk_inputs(k, logits.expand(V, V), ref_logits.expand(V, V), every)
    m = kl_from_topk(**inputs, old_logp=old if off_policy else None, direction=direction)
    exact = kl_from_logits(logits, ref_logits, direction=direction)
    close((old.exp() * m).sum(), exact.loss)
    expected = torch.autograd.grad(exact.loss, logits)[0]
    close(torch.autograd.grad((old.exp() * m).sum(), logits, retain_graph=True)[0], expected)
    if k == V:  # then no draw matters
        close(torch.autograd.grad(m[0], logits)[0], expected)


def test_topk_masked_junk_and_excluded_tokens():
    logits, ref_logits = 2 * draw(B, T, V, seed=14), 2 * draw(B, T, V, seed=15)
    logits[..., :4] = ref_logits[..., :4] = -math.inf
    logits.requires_grad_()
    inputs = topk_inputs(V, logits, ref_logits, LABELS.clamp(min=4))  # the top V hold the excluded ones
    exact = kl_from_logits(logits, ref_logits)
    m = kl_from_topk(**inputs)
    close(m, exact.kl)
    close(torch.autograd.grad(m.sum(), logits)[0], torch.autograd.grad(exact.loss, logits)[0])

    mask = torch.ones(B, T, dtype=torch.bool)
    mask[1, 2] = False
    inputs = {n: x.detach().clone() for n, x in topk_inputs(3, logits, ref_logits, LABELS.clamp(min=4)).items()}
    for name in ("topk_logp", "ref_topk_logp", "logp", "ref_logp"):
        inputs[name][1, 2] = math.nan
    for name in ("topk_logp", "logp"):
        inputs[name].requires_grad_()
    m = kl_from_topk(**inputs, mask=mask, old_logp=inputs["logp"].detach())
    gradients = torch.autograd.grad(m.sum(), (inputs["topk_logp"], inputs["logp"]))
    assert m[1, 2] == 0
    assert all((g[1, 2] == 0).all() and torch.isfinite(g).all() for g in gradients)


def test_topk_has_less_variance_than_a_sample():
    logits = 2 * draw(V, seed=16)
    ref_logits = logits + 0.5 * draw(V, seed=17)
    p = logits.softmax(-1)

    def variance(k):
        leaf = logits.expand(V, V).clone().requires_grad_()
        m = kl_from_topk(**topk_inputs(k, leaf, ref_logits.expand(V, V), torch.arange(V)))
        gradients = torch.autograd.grad(m.sum(), leaf)[0]
        return (p @ (gradients - p @ gradients).square().sum(-1)).item()

    sampled, some, all_ = variance(0), variance(8), variance(V)
    assert all_ < 1e-20
    assert some < sampled / 2


def test_what_does_not_fit_is_named():
    hidden, weight, ref_hidden, ref_weight = models()
    run = kl_from_hidden
    for arguments, message in (
        ((hidden, weight, ref_hidden, ref_weight[:-1]), r"ref_weight \(36, 5\)"),
        ((hidden, weight, ref_hidden[:2], ref_weight), r"ref_hidden \(2, 7, 5\)"),
        ((hidden.float(), weight, ref_hidden, ref_weight), r"torch.float32 and weight"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*arguments)
    for settings, message in (
        (dict(direction="both"), "direction='both': one of reverse, forward, mse"),
        (dict(temperature=0.0), "temperature=0.0"),
        (dict(temperature=math.inf), "temperature=inf"),
        (dict(softcap=-1.0), "softcap=-1.0"),
        (dict(chunk=0), "chunk=0"),
        (dict(bias=torch.zeros(3)), r"bias has shape \(3,\), needs \(37,\)"),
        (dict(labels=LABELS[0]), r"labels has shape \(7,\)"),
        (dict(labels=LABELS + V), r"label \d+ is not in \[0, 37\)"),
        (dict(labels=LABELS - V), r"label -\d+ is not in \[0, 37\)"),
        (dict(token_weights=torch.ones(2)), r"token_weights has shape \(2,\)"),
        (dict(token_loss=lambda logp, positions: logp), "token_loss is a loss of the labels' log-probabilities"),
        (dict(token_loss=lambda logp, positions: logp.sum(), labels=LABELS), r"token_loss gave \(\) for logp \(21,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            run(hidden, weight, ref_hidden, ref_weight, **settings)
    with pytest.raises(ValueError, match="must be one"):
        kl_from_logits(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"ref_topk_logp has shape \(2, 3\), needs \(2, 4\)"):
        kl_from_topk(torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(2, 3), labels=torch.zeros(2), logp=0, ref_logp=0)


def test_a_vocabulary_over_two_ranks(tmp_path):
    """Two gloo processes, uneven shards: every result and gradient is the whole vocabulary's."""
    script = Path(__file__).with_name("shard_rank.py")
    ranks = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path / "rendezvous")], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for rank in ranks:
        _, error = rank.communicate(timeout=120)
        assert rank.returncode == 0, error.decode()
