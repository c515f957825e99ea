"""The head: constants by hand, the slow oracle, exact enumeration, masks, extremes, compile.

Case numbers: faults as people report them against RLHF frameworks.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import head_reference

from kl_plugins import KLConfig, combined_advantages, kl_head

L, OLD, R = [[-1.0, -2.0]], [[-1.5, -1.9]], [[-1.2, -2.4]]  # the worked example of the paper's (69), (70)


def head(logp, ref_logp, mask=None, old_logp=None, rollout_weights=None, dtype=torch.float64, **axes):
    """(value, gradient) of kl_head for nested lists."""

    def tensor(x):
        return None if x is None else torch.tensor(x, dtype=dtype)

    logp = tensor(logp).requires_grad_()
    m = kl_head(
        logp,
        tensor(ref_logp),
        mask=torch.ones_like(logp) if mask is None else torch.tensor(mask),
        config=KLConfig(**axes),
        old_logp=tensor(old_logp),
        rollout_weights=tensor(rollout_weights),
    )
    m.sum().backward()
    return m.detach(), logp.grad


def close(actual, expected, rel=1e-6):
    torch.testing.assert_close(actual.double(), torch.tensor(expected, dtype=torch.float64), rtol=rel, atol=rel)


def test_clip_on_the_worked_example():  # case 12
    value, gradient = head(L, R, old_logp=OLD, correction="clip")
    close(gradient, [[0.329744, 0.361935]], 1e-5)
    close(value, [[1.648721 * 0.02, 0.904837 * 0.08]], 1e-5)
    _, gradient = head([[-1.0]], [[-1.2]], old_logp=[[-0.5]], correction="clip")
    close(gradient, [[0.0]])


def test_clip_is_a_maximum_not_a_minimum():
    """rho above the clip with a positive coefficient still pulls back (math: max, since the penalty is minimised)."""
    _, gradient = head([[-1.0]], [[-1.5]], old_logp=[[-1.0 - math.log(1.5)]], correction="clip")
    close(gradient, [[0.75]])
    _, gradient = head([[-1.5]], [[-1.0]], old_logp=[[-1.5 - math.log(1.5)]], correction="clip")
    close(gradient, [[0.0]])


def test_token_and_sequence_ratio():  # case 11
    close(head(L, R, old_logp=OLD, estimator="k3", correction="is")[0].mean(), 0.0472550, 1e-5)
    close(head(L, R, old_logp=OLD, estimator="k3", correction="is", ratio="sequence")[0].mean(), 0.0664, 1e-3)


def test_ratio_cap():
    _, gradient = head([[-1.0]], [[-2.0]], old_logp=[[-9.0]], correction="is", ratio_cap=10.0)
    close(gradient, [[10.0]])


def test_ratio_of_one_is_not_no_gradient():  # case 15
    close(head([[-1.0]], [[-2.0]], old_logp=[[-1.0]], correction="clip")[1], [[1.0]])


def test_loss_has_a_gradient():  # case 13
    close(head([[-1.0]], [[-2.0]])[1], [[1.0]])


def test_penalty_is_minimised():  # case 8
    logp = torch.tensor([[-1.0]], requires_grad=True)
    loss = 0.1 * kl_head(logp, torch.tensor([[-2.0]]), mask=torch.ones(1, 1), config=KLConfig()).mean()
    loss.backward()
    assert loss.item() == pytest.approx(0.05)
    assert logp.grad.item() == pytest.approx(0.1)


def test_k1_in_reward_is_k2_as_loss():
    """(13) and (14): one gradient; only the value that is reported differs."""
    for credit in ("token", "return", "sequence"):
        reward = head(L, R, estimator="k1", placement="reward", credit=credit)
        loss = head(L, R, estimator="k2", credit=credit)
        assert torch.equal(reward[1], loss[1])
        assert not torch.equal(reward[0], loss[0])


def test_report_one_descend_another():  # case 14
    value, gradient = head([[-1.0]], [[-2.0]], estimator="k2", report="k3")
    close(value, [[0.3678794]])
    close(gradient, [[1.0]])
    close(head([[-1.0]], [[-2.0]], estimator="k3")[1], [[0.6321206]])


def test_padding_sentinels():  # case 4
    value, gradient = head([[-1.0, -1e10]], [[-1.5, 0.0]], mask=[[1, 0]], estimator="k3")
    close(value.sum(), 0.1065307)
    close(gradient[0, 1], 0.0)


def test_tool_tokens():  # case 16
    value, _ = head([[-0.5, -8, -9, -0.7]], [[-0.6, -2, -3, -0.5]], mask=[[1, 0, 0, 1]], estimator="k3")
    close(value.sum() / 2, 0.0131201, 1e-5)


def test_credit_over_a_masked_gap():  # case 17
    inputs = dict(logp=[[-1.0, -2.0, -0.5, -1.0]], ref_logp=[[-1.3, -1.5, -0.9, -1.0]], mask=[[1, 1, 0, 1]])
    close(head(**inputs, credit="return")[1], [[-0.2, -0.5, 0.0, 0.0]])
    close(head(**inputs, credit="sequence")[1], [[-0.2, -0.2, 0.0, -0.2]])


def test_no_valid_token():  # case 5
    for credit, ratio in itertools.product(("token", "return", "sequence"), ("token", "sequence")):
        value, gradient = head(
            L, R, mask=[[0, 0]], old_logp=OLD, estimator="k3", correction="is", credit=credit, ratio=ratio
        )
        close(value, [[0.0, 0.0]])
        close(gradient, [[0.0, 0.0]])


def test_no_reference_gives_zero():  # case 21
    for estimator in ("k2", "k3", "none"):
        value, gradient = head(L, None, estimator=estimator)
        close(value, [[0.0, 0.0]])
        close(gradient, [[0.0, 0.0]])
    close(head(L, None, estimator="k1", allow_vacuous=True)[1], [[0.0, 0.0]])


def test_categorical_example_on_policy():  # case 9
    pi, ref = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.5, 0.3, 0.2]).double()

    def expected_gradient(**axes):
        theta = pi.log().requires_grad_()
        logp = theta.log_softmax(-1).unsqueeze(-1)  # [B=3, T=1], every response once
        m = kl_head(logp, ref.log().unsqueeze(-1), mask=torch.ones(3, 1), config=KLConfig(**axes))
        (pi.unsqueeze(-1) * m).sum().backward()
        return theta.grad

    close(expected_gradient(estimator="k1", allow_vacuous=True), [0.0, 0.0, 0.0], 1e-12)
    close(expected_gradient(estimator="k2"), [0.175945, -0.098118, -0.077827])
    close(expected_gradient(estimator="k3"), [0.2, -0.1, -0.1])


def test_categorical_example_off_policy():  # case 10
    pi, ref, old = (torch.tensor(p).double() for p in ([0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.4, 0.4, 0.2]))

    def mean(correction):
        m = kl_head(
            pi.log().unsqueeze(-1),
            ref.log().unsqueeze(-1),
            mask=torch.ones(3, 1),
            config=KLConfig(estimator="k3", correction=correction),
            old_logp=old.log().unsqueeze(-1),
        )
        return (old.unsqueeze(-1) * m).sum()

    close(mean("none"), 0.1194877)
    close(mean("is"), 0.0851228)


AXES = list(
    itertools.product(
        ["k2", "k3", "mse", "none"], ["none", "is", "clip"], ["token", "sequence"], ["token", "return", "sequence"]
    )
)


@pytest.mark.parametrize(("estimator", "correction", "ratio", "credit"), AXES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_against_the_slow_oracle(estimator, correction, ratio, credit, data):
    rows, columns = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))

    def matrix(low, high):
        return torch.tensor(
            data.draw(
                st.lists(
                    st.lists(st.floats(low, high), min_size=columns, max_size=columns), min_size=rows, max_size=rows
                )
            ),
            dtype=torch.float64,
        )

    logp, ref_logp, old_logp = matrix(-6, -0.01), matrix(-6, -0.01), matrix(-6, -0.01)
    mask, weights = matrix(0, 1) > 0.3, matrix(0, 2) if data.draw(st.booleans()) else None
    axes = dict(
        estimator=estimator,
        correction=correction,
        ratio=ratio,
        credit=credit,
        report=data.draw(st.sampled_from([None, "k1", "k3"])),
        clip_low=data.draw(st.floats(0, 0.9)),
        clip_high=data.draw(st.floats(0, 2)),
        ratio_cap=data.draw(st.floats(3, 50)),
        coefficient_bound=data.draw(st.sampled_from([None, 0.5, 3.0])),
    )
    junk = torch.where(mask, 0.0, float("nan"))
    leaf = (logp + junk).requires_grad_()
    m = kl_head(
        leaf, ref_logp + junk, mask=mask, config=KLConfig(**axes), old_logp=old_logp + junk, rollout_weights=weights
    )
    m.sum().backward()
    value, gradient = head_reference(logp, ref_logp, mask, old_logp, weights, **axes)
    torch.testing.assert_close(m.detach(), value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", ["k2", "k3", "mse"])
@pytest.mark.parametrize("correction", ["none", "is", "clip"])
@pytest.mark.parametrize("credit", ["token", "return"])
def test_extremes_in_every_dtype(dtype, estimator, correction, credit):
    far = [[-120.0, -1.0, 0.0, -60000.0]], [[-1.0, -120.0, -60000.0, 0.0]], [[-1.0, -119.0, -3.0, -60000.0]]
    logp, ref_logp, old_logp = (torch.tensor(x, dtype=dtype) for x in far)
    logp.requires_grad_()
    config = KLConfig(estimator=estimator, correction=correction, credit=credit, coefficient_bound=50.0)
    m = kl_head(logp, ref_logp, mask=torch.ones(1, 4), config=config, old_logp=old_logp)
    m.sum().backward()
    assert m.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert logp.grad.dtype == dtype
    assert torch.isfinite(m).all()
    assert torch.isfinite(logp.grad).all()


def test_far_token_still_pulls_back():
    _, gradient = head([[-120.0]], [[-1.0]], estimator="k3", dtype=torch.float32)
    assert gradient.item() < -1e8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_with_float64_on_the_same_numbers(dtype):
    generator = torch.Generator().manual_seed(0)
    logp, ref_logp, old_logp = (-torch.rand(4, 16, generator=generator).mul(5).to(dtype) for _ in range(3))
    config = KLConfig(estimator="k3", correction="clip", credit="return")

    def run(to):
        leaf = logp.detach().to(to, copy=True).requires_grad_()
        m = kl_head(leaf, ref_logp.to(to), mask=torch.ones(4, 16), config=config, old_logp=old_logp.to(to))
        m.sum().backward()
        return m.detach().double(), leaf.grad.double()

    (value, gradient), (exact_value, exact_gradient) = run(dtype), run(torch.float64)
    torch.testing.assert_close(value, exact_value, rtol=1e-5, atol=1e-5)
    eps = torch.finfo(dtype).eps  # only the gradient is cast back
    torch.testing.assert_close(gradient, exact_gradient, rtol=eps, atol=eps)


@given(junk=st.sampled_from([float("nan"), float("inf"), -float("inf"), -1e10, 1e10]))
def test_masked_junk_contributes_nothing(junk):
    for credit, ratio, correction in itertools.product(
        ("token", "return", "sequence"), ("token", "sequence"), ("none", "is", "clip")
    ):
        axes = dict(estimator="k3", credit=credit, ratio=ratio, correction=correction)
        clean = head([[-1.0, -5.0, -2.0]], [[-1.2, -5.0, -2.4]], [[1, 0, 1]], [[-1.5, -5.0, -1.9]], **axes)
        dirty = head([[-1.0, junk, -2.0]], [[-1.2, junk, -2.4]], [[1, 0, 1]], [[-1.5, junk, -1.9]], **axes)
        assert torch.equal(clean[0], dirty[0])
        assert torch.equal(clean[1], dirty[1])


@pytest.mark.parametrize("name", ["logp", "ref_logp", "old_logp", "rollout_weights"])
def test_non_finite_at_an_unmasked_place_is_named(name):
    inputs = {n: torch.full((2, 3), -1.0) for n in ("logp", "ref_logp", "old_logp", "rollout_weights")}
    inputs[name][1, 2] = float("nan")
    inputs[name][1, 1] = float("inf")
    config = KLConfig(correction="is")
    with pytest.raises(ValueError, match=rf"{name} is not finite at 2 of 6 unmasked tokens, first at \[1, 1\]: inf"):
        kl_head(mask=torch.ones(2, 3), config=config, **inputs)
    kl_head(mask=torch.tensor([[1, 1, 1], [1, 0, 0]]), config=config, **inputs)


def test_wrong_shapes_and_missing_old_logp():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1\), logp \(2, 3\)"):
        kl_head(x, x, mask=torch.ones(2, 1), config=KLConfig())
    with pytest.raises(ValueError, match=r"ref_logp has shape \(3,\)"):
        kl_head(x, x[0], mask=x, config=KLConfig())
    with pytest.raises(ValueError, match="kl.correction='clip' needs old_logp"):
        kl_head(x, x, mask=x, config=KLConfig(correction="clip"))


def test_second_derivative_is_refused():
    logp = torch.tensor(L, requires_grad=True)
    m = kl_head(logp, torch.tensor(R), mask=torch.ones(1, 2), config=KLConfig())
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(m.sum(), logp, create_graph=True)


AXES_KEPT = [
    dict(),
    dict(estimator="k3"),
    dict(estimator="k1", placement="reward"),
    dict(estimator="mse", report="k1"),
    dict(correction="clip", credit="return"),
    dict(correction="is", ratio="sequence", credit="sequence", coefficient_bound=1.0),
]


@pytest.mark.parametrize("axes", AXES_KEPT, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_matrix_is_kept_for_backward(axes, dtype):
    shape = (3, 5)
    logp, ref_logp, old_logp = (-torch.rand(shape).to(dtype) for _ in range(3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        m = kl_head(logp.requires_grad_(), ref_logp, mask=torch.ones(shape), config=KLConfig(**axes), old_logp=old_logp)
    assert [t.untyped_storage().nbytes() for t in kept] == [4 * m.numel()]
    assert kept[0].untyped_storage().data_ptr() != m.untyped_storage().data_ptr()


def test_upstream_gradient_is_multiplied_in():
    logp = torch.tensor(L, requires_grad=True)
    m = kl_head(logp, torch.tensor(R), mask=torch.ones(1, 2), config=KLConfig())
    m.backward(torch.tensor([[2.0, -3.0]]))
    close(logp.grad, [[0.4, -1.2]], 1e-5)


def test_compile():
    logp, ref_logp, old_logp = torch.tensor(L, requires_grad=True), torch.tensor(R), torch.tensor(OLD)
    config = KLConfig(correction="clip", credit="return")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(logp, ref_logp):
        return kl_head(logp.tanh(), ref_logp, mask=torch.ones(1, 2), config=config, old_logp=old_logp).sum()

    def eager(logp, ref_logp):
        return kl_head(logp.tanh(), ref_logp, mask=torch.ones(1, 2), config=config, old_logp=old_logp).sum()

    compiled = torch.autograd.grad(loss(logp, ref_logp), logp)[0]
    torch.testing.assert_close(compiled, torch.autograd.grad(eager(logp, ref_logp), logp)[0])
    with pytest.raises(RuntimeError, match="non-finite input at an unmasked token"):
        loss(logp, ref_logp * float("nan"))


def test_coefficient_bound_is_smooth_and_keeps_the_sign():
    _, gradient = head([[-1.0, -9.0, -1.0]], [[-1.001, -1.0, -9.0]], coefficient_bound=2.0)
    close(gradient, [[2 * math.tanh(0.001 / 2), -2 * math.tanh(4), 2 * math.tanh(4)]])


def test_identity_live_ratio_times_k3_is_k2():
    """grad(rho k3 with rho live) = rho * log_ratio * grad logp = grad(sg(rho) k2), sample by sample."""
    logp = torch.tensor(L, dtype=torch.float64, requires_grad=True)
    ref_logp, old_logp = torch.tensor(R, dtype=torch.float64), torch.tensor(OLD, dtype=torch.float64)
    r = logp - ref_logp
    live = ((logp - old_logp).exp() * (torch.exp(-r) - 1 + r)).sum()
    close(torch.autograd.grad(live, logp)[0], head(L, R, old_logp=OLD, correction="is")[1].tolist(), 1e-12)


def test_combined_advantages():
    a = combined_advantages(
        torch.tensor([[1.0, 1.0, 7.0]]),
        torch.tensor([[-1.0, -2.0, float("nan")]], requires_grad=True),
        torch.tensor([[-1.5, -2.5, 0.0]]),
        beta=0.5,
        mask=torch.tensor([[1, 1, 0]]),
        config=KLConfig(form="combined", credit="return"),
    )
    close(a, [[0.5, 0.75, 7.0]])
    assert not a.requires_grad


def test_combined_and_decoupled_are_different_regularisers():
    """rho = 1.5, eps = .2, A = 1, beta c = .5: combined has zero gradient, the decoupled head pulls with .75."""
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old_logp, ref_logp = logp.detach() - math.log(1.5), logp.detach() - 0.5
    mask, config = torch.ones(1, 1), KLConfig(correction="clip")
    a = combined_advantages(
        torch.ones(1, 1), logp, ref_logp, beta=1.0, mask=mask, config=KLConfig(form="combined", correction="clip")
    )
    rho = (logp - old_logp).exp()
    loss = -torch.min(rho * a, rho.clamp(0.8, 1.2) * a).sum()
    close(torch.autograd.grad(loss, logp)[0], [[0.0]])
    m = kl_head(logp, ref_logp, mask=mask, config=config, old_logp=old_logp)
    close(torch.autograd.grad(m.sum(), logp)[0], [[0.75]])


def test_micro_batches_add_up_to_the_batch():  # case 18
    generator = torch.Generator().manual_seed(1)
    logp, ref_logp, old_logp = (-torch.rand(6, 9, generator=generator, dtype=torch.float64) * 4 for _ in range(3))
    mask = torch.rand(6, 9, generator=generator) > 0.3
    config = KLConfig(correction="clip", credit="sequence", ratio="sequence")

    def gradient(rows, columns):
        leaf = logp[rows, :columns].clone().requires_grad_()
        kl_head(
            leaf, ref_logp[rows, :columns], mask=mask[rows, :columns], config=config, old_logp=old_logp[rows, :columns]
        ).sum().backward()
        return leaf.grad

    mask[:, 7:] = False  # a longer pad changes nothing either
    whole = gradient(slice(0, 6), 9)
    parts = torch.cat([gradient(slice(0, 2), 7), gradient(slice(2, 6), 7)])
    torch.testing.assert_close(whole[:, :7], parts, rtol=0, atol=1e-12)
    assert (whole[:, 7:] == 0).all()
