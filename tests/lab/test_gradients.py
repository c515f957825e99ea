"""The lab against closed forms worked by hand, and the claims of arXiv 2510.01555 against the lab."""

import ast
import math
import pathlib
from dataclasses import dataclass

import pytest
import torch

import kl_plugins.lab
from kl_plugins import KLConfig, kl_head
from kl_plugins.lab import (
    TabularPolicy,
    estimator_coefficient,
    estimator_curve,
    estimator_value,
    exact_kl,
    exact_kl_gradient,
    expected_gradient,
    gradient_moments,
    gradient_report,
    importance_ratio,
    loss_coefficients,
    token_coefficients,
)


@dataclass
class Cell:
    """A configuration without the rules of KLConfig, so that wrong ones can be judged too."""

    estimator: object = "k2"
    placement: str = "loss"
    form: str = "decoupled"
    correction: str = "none"
    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio: str = "token"
    ratio_cap: float = 1e9
    credit: str = "token"


def close(actual, expected, tolerance=1e-13):
    torch.testing.assert_close(
        actual.detach(), torch.as_tensor(expected, dtype=torch.float64).detach(), rtol=tolerance, atol=tolerance
    )


def triple(vocabulary=3, length=3, seed=0):
    policy = TabularPolicy.random(vocabulary, length, seed)
    return policy, policy.near(0.7, seed + 100), policy.near(0.3, seed + 200)


@pytest.fixture
def categorical():
    return tuple(TabularPolicy.from_probabilities(p) for p in ([0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.4, 0.4, 0.2]))


# One token, by hand: π = (½, ½), π_ref = (¼, ¾), so ℓ = (ln 2, ln ⅔) and the score of token 0 is (½, -½).
HALF, QUARTER = TabularPolicy.from_probabilities([0.5, 0.5]), TabularPolicy.from_probabilities([0.25, 0.75])
A, B = math.log(2), math.log(2 / 3)


@pytest.mark.parametrize(
    ("estimator", "coefficients"),
    [("k1", (1, 1)), ("k2", (A, B)), ("k3", (1 / 2, -1 / 2)), ("mse", (1 / 4, -1 / 4)), ("none", (0, 0))],
)
def test_one_token_by_hand(estimator, coefficients):
    first, second = coefficients
    close(token_coefficients(Cell(estimator), HALF, QUARTER), [[first], [second]])
    gradient = (first - second) / 4  # ½·first·½ - ½·second·½
    close(expected_gradient(Cell(estimator), HALF, QUARTER), [gradient, -gradient])
    # The two outcomes are first·(½,-½) and second·(-½,½): half their distance, squared.
    _, variance = gradient_moments(token_coefficients(Cell(estimator), HALF, QUARTER), HALF)
    assert variance == pytest.approx((first + second) ** 2 / 8, abs=1e-15)


def test_one_token_objectives_by_hand():
    for direction, value, gradient in [
        ("reverse", (A + B) / 2, (A - B) / 4),  # ½(ℓ_0 - mean)
        ("forward", -A / 4 - 3 * B / 4, 1 / 4),  # π - π_ref
        ("mse", 1 / 16, 1 / 8),  # ½·2·(¼)²; (π - π_ref)_0·½·½ - (π - π_ref)_1·½·½
    ]:
        assert exact_kl(HALF, QUARTER, direction).item() == pytest.approx(value, abs=1e-15)
        close(exact_kl_gradient(HALF, QUARTER, direction), [gradient, -gradient])


# Two tokens, by hand. KL of the three states: ½ln(4/3), ¾ln(3/2) - ¼ln 2, ½ln(4/3).
TWO = TabularPolicy.from_probabilities([[0.5, 0.5], [0.75, 0.25], [0.5, 0.5]])
TWO_REF = TabularPolicy.from_probabilities([[0.25, 0.75], [0.5, 0.5], [0.25, 0.75]])
KL_ROOT, KL_0 = math.log(4 / 3) / 2, 0.75 * math.log(1.5) - 0.25 * math.log(2)


def test_two_tokens_reverse_kl_by_hand():
    assert exact_kl(TWO, TWO_REF).item() == pytest.approx(KL_ROOT + KL_0 / 2 + KL_ROOT / 2, abs=1e-15)
    # Root: what follows token y costs ℓ_y plus the KL of the state it leads to.
    root = 0.25 * ((A + KL_0) - (B + KL_ROOT))
    after_0 = 0.5 * 0.75 * (math.log(1.5) - KL_0)
    after_1 = 0.5 * 0.5 * (A - KL_ROOT)
    exact = [root, -root, after_0, -after_0, after_1, -after_1]
    close(exact_kl_gradient(TWO, TWO_REF), exact)
    for credit in ("return", "sequence"):
        close(expected_gradient(Cell(credit=credit), TWO, TWO_REF), exact)
    close(expected_gradient(Cell("k1", placement="reward", credit="return"), TWO, TWO_REF), exact)

    frozen = 0.25 * (A - B)  # token credit does not see the state that follows
    per_state = [frozen, -frozen, after_0, -after_0, after_1, -after_1]
    close(exact_kl_gradient(TWO, TWO_REF, per_state=True), per_state)
    close(expected_gradient(Cell(credit="token"), TWO, TWO_REF), per_state)
    report = gradient_report(Cell(credit="token"), TWO, TWO_REF)
    assert report.bias == pytest.approx(math.sqrt(2) * abs(root - frozen), abs=1e-15)


def test_two_tokens_forward_kl_by_hand():
    # ∂/∂logits of KL(ref‖π) at a state is π - π_ref, weighted by how often the *reference* comes by: 1, ¼, ¾.
    close(exact_kl_gradient(TWO, TWO_REF, "forward"), [1 / 4, -1 / 4, 1 / 16, -1 / 16, 3 / 16, -3 / 16])
    # k3 with token credit weights the states by the policy's visits instead: 1, ½, ½.
    per_state = [1 / 4, -1 / 4, 1 / 8, -1 / 8, 1 / 8, -1 / 8]
    close(exact_kl_gradient(TWO, TWO_REF, "forward", per_state=True), per_state)
    close(expected_gradient(Cell("k3"), TWO, TWO_REF), per_state)
    assert gradient_report(Cell("k3"), TWO, TWO_REF, direction="forward").relative_error > 0.1


def test_two_tokens_variance_is_that_of_the_enumerated_gradients():
    policy, reference, behaviour = triple(2, 2, seed=3)
    cell = Cell("k3", correction="is", credit="return")
    coefficients = token_coefficients(cell, policy, reference, behaviour)
    rows = []
    for y, a in zip(policy.responses(), coefficients, strict=True):
        score = torch.autograd.grad((policy.logp(y[None])[0] * a).sum(), policy.logits)[0]
        rows.append(score.flatten())
    rows, p = torch.stack(rows), behaviour.response_probabilities()
    mean, variance = gradient_moments(coefficients, policy, behaviour)
    close(mean, p @ rows)
    assert variance == pytest.approx(float(p @ ((rows - p @ rows) ** 2).sum(-1)), rel=1e-12)


def test_per_state_weights_can_be_another_policys():
    policy, reference, behaviour = triple()
    for direction in ("reverse", "forward", "mse"):
        own = exact_kl_gradient(policy, reference, direction, per_state=True)
        assert not torch.allclose(
            own, exact_kl_gradient(policy, reference, direction, per_state=True, states=behaviour)
        )
    # The chain rule of forward KL: its states are the reference's.
    close(
        exact_kl_gradient(policy, reference, "forward"),
        exact_kl_gradient(policy, reference, "forward", per_state=True, states=reference),
    )


def test_per_state_objective_sums_to_the_response_kl():
    policy, reference, _ = triple()
    close(exact_kl(policy, reference), exact_kl(policy, reference, per_state=True))


def test_categorical_example(categorical):
    policy, reference, old = categorical
    assert exact_kl(policy, reference).item() == pytest.approx(0.0851228, abs=5e-8)
    kl_gradient = exact_kl_gradient(policy, reference)
    assert kl_gradient.tolist() == pytest.approx([0.175945, -0.098118, -0.077827], abs=5e-7)
    close(expected_gradient(Cell("k1"), policy, reference), [0, 0, 0], 1e-15)
    close(expected_gradient(Cell("k2"), policy, reference), kl_gradient)
    close(expected_gradient(Cell("k3"), policy, reference), [0.2, -0.1, -0.1])

    logp, ref_logp = (p.logp(p.responses()).detach() for p in (policy, reference))
    k3 = estimator_value("k3", logp, ref_logp)[:, 0]
    assert float(old.response_probabilities() @ k3) == pytest.approx(0.1194877, abs=5e-8)
    ratio = importance_ratio(logp, old.logp(old.responses()).detach(), "token")[:, 0]
    assert float(old.response_probabilities() @ (ratio * k3)) == pytest.approx(0.0851228, abs=5e-8)


@pytest.mark.parametrize(("vocabulary", "length"), [(3, 1), (5, 1), (2, 3), (3, 2)])
def test_what_each_estimator_descends_when_the_response_is_one_action(vocabulary, length):
    policy, reference, behaviour = triple(vocabulary, length)
    targets = {
        "k1": torch.zeros(policy.logits.numel()),
        "k2": exact_kl_gradient(policy, reference),
        "k3": exact_kl_gradient(policy, reference, "forward"),
        "mse": exact_kl_gradient(policy, reference, "mse"),
    }
    for estimator, target in targets.items():
        close(expected_gradient(Cell(estimator), policy, reference, bandit=True), target)
        off = expected_gradient(Cell(estimator), policy, reference, behaviour, bandit=True)
        assert not torch.allclose(off, target.double())  # no importance weight, another gradient
        corrected = Cell(estimator, correction="is")
        close(expected_gradient(corrected, policy, reference, behaviour, bandit=True), target)


def test_values_on_policy():
    policy, reference, _ = triple(4, 1)
    logp, ref_logp = (p.logp(p.responses()).detach() for p in (policy, reference))
    means = {
        e: float(policy.response_probabilities() @ estimator_value(e, logp, ref_logp)[:, 0])
        for e in ("k1", "k2", "k3", "mse", "none")
    }
    kl = exact_kl(policy, reference).item()
    assert means["k1"] == pytest.approx(kl, abs=1e-14)
    assert means["k3"] == pytest.approx(kl, abs=1e-14)
    assert abs(means["k2"] - kl) > 1e-3
    assert means["mse"] == pytest.approx(exact_kl(policy, reference, "mse").item(), abs=1e-14)
    assert means["none"] == means["k1"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("vocabulary", "length"), [(2, 4), (3, 3), (4, 2)])
def test_credit_on_policy(vocabulary, length, seed):
    policy, reference, _ = triple(vocabulary, length, seed)
    for credit in ("return", "sequence"):
        for cell in (Cell("k2", credit=credit), Cell("k1", placement="reward", credit=credit)):
            report = gradient_report(cell, policy, reference)
            assert report.relative_error < 1e-13
            assert report.cosine == pytest.approx(1, abs=1e-13)
    token = gradient_report(Cell("k2"), policy, reference)
    assert token.relative_error > 0.02  # it drops the future
    close(token.expected, exact_kl_gradient(policy, reference, per_state=True))
    assert token.variance < gradient_report(Cell("k2", credit="return"), policy, reference).variance


def test_what_token_credit_drops_on_unrelated_random_policies_of_three_tokens():
    pairs = [(TabularPolicy.random(3, 3, seed), TabularPolicy.random(3, 3, 1000 + seed)) for seed in range(20)]
    errors = [gradient_report(Cell(), *pair).relative_error for pair in pairs]
    assert min(errors) > 0.15
    assert max(errors) < 0.85
    assert sum(errors) / 20 == pytest.approx(0.37, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_off_policy_exactness(seed):
    policy, reference, behaviour = triple(3, 3, seed)
    reverse = exact_kl_gradient(policy, reference)

    def gradient(**axes):
        return expected_gradient(Cell(**axes), policy, reference, behaviour)

    for credit in ("return", "sequence"):
        close(gradient(correction="is", ratio="sequence", credit=credit), reverse)
        for axes in (dict(), dict(correction="is", ratio="token"), dict(correction="is", ratio="prefix")):
            assert not torch.allclose(gradient(credit=credit, **axes), reverse, rtol=1e-3)
    on_policy_token = expected_gradient(Cell(), policy, reference)
    close(gradient(correction="is", ratio="prefix"), on_policy_token)
    close(gradient(correction="is", ratio="sequence"), on_policy_token)
    # The token ratio mends the token, not the state it was met in.
    close(gradient(correction="is"), exact_kl_gradient(policy, reference, per_state=True, states=behaviour))


def test_sampler_mismatch_is_corrected_by_its_weights():
    policy, reference, behaviour = triple(3, 1)
    sampler = behaviour.near(0.4, seed=9)
    cell = Cell(correction="is")
    close(expected_gradient(cell, policy, reference, behaviour, sampler=sampler), exact_kl_gradient(policy, reference))
    assert gradient_report(cell, policy, reference, behaviour, sampler=sampler).relative_error < 1e-13
    capped = token_coefficients(Cell(ratio_cap=1.1), policy, reference, behaviour, sampler=sampler)
    logp, ref_logp, old, drawn = (p.logp(p.responses()).detach() for p in (policy, reference, behaviour, sampler))
    assert bool(((old - drawn).exp() > 1.1).any())
    close(capped, (old - drawn).exp().clamp(max=1.1) * (logp - ref_logp))


def test_cap_and_clip_act_on_the_tokens_they_should():
    policy, reference, behaviour = triple(5, 2)
    responses = policy.responses()
    logp, ref_logp, old_logp = (p.logp(responses).detach() for p in (policy, reference, behaviour))
    ratio, ell = (logp - old_logp).exp(), logp - ref_logp
    close(
        token_coefficients(Cell(correction="is", ratio_cap=1.1), policy, reference, behaviour),
        ratio.clamp(max=1.1) * ell,
    )
    clipped = token_coefficients(Cell(correction="clip", clip_low=0.1, clip_high=0.3), policy, reference, behaviour)
    off = ((ell > 0) & (ratio < 0.9)) | ((ell < 0) & (ratio > 1.3))
    assert 0 < int(off.sum()) < off.numel()
    close(clipped, torch.where(off, 0.0, ratio * ell))


# ρ = 1.5 at token 0 of one-token responses, ε = 0.2, A = 1, βc = 0.5 there.
def test_combined_and_decoupled_are_different_regularisers():
    policy, old = TabularPolicy.from_probabilities([0.6, 0.4]), TabularPolicy.from_probabilities([0.4, 0.6])
    reference = TabularPolicy.from_probabilities([0.6 * math.exp(-1), 1 - 0.6 * math.exp(-1)])
    advantage = torch.tensor([1.0, 0.0])

    def at_token_0(form, **axes):
        cell = Cell("k2", form=form, correction="clip", **axes)
        return float(token_coefficients(cell, policy, reference, old, advantage=advantage, beta=0.5)[0, 0])

    assert at_token_0("decoupled") == pytest.approx(0.75)
    assert at_token_0("combined") == 0
    # A clip that leaves this token alone: both forms pull by ρβc.
    assert at_token_0("combined", clip_high=0.6) == pytest.approx(0.75)


def test_combined_without_advantage_is_decoupled_and_both_agree_on_policy():
    policy, reference, behaviour = triple()
    combined, decoupled = (Cell(form=form, correction="clip", credit="return") for form in ("combined", "decoupled"))
    close(
        token_coefficients(combined, policy, reference, behaviour),
        token_coefficients(decoupled, policy, reference, behaviour),
    )
    advantage = torch.linspace(-1, 1, 27)
    close(
        expected_gradient(combined, policy, reference, advantage=advantage),
        exact_kl_gradient(policy, reference),
    )


def test_combined_penalty_is_the_difference_of_two_policy_losses():
    """(70) written out with min and clamp and differentiated: with the penalty in the advantage, less without."""
    policy, reference, behaviour = triple(3, 2)
    generator = torch.Generator().manual_seed(0)
    advantage = torch.randn(9, 2, dtype=torch.float64, generator=generator)
    for cell in (Cell("k2", form="combined", credit="return"), Cell("k1", placement="reward", credit="sequence")):

        def ppo(logp, ref_logp, old_logp, cell=cell):
            ell = (logp - ref_logp).detach()
            penalty = ell.sum(-1, keepdim=True) if cell.credit == "sequence" else ell.flip(-1).cumsum(-1).flip(-1)
            ratio = (logp - old_logp).exp()
            losses = [
                -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a) for a in (advantage - 0.4 * penalty, advantage)
            ]
            return losses[0] - losses[1]

        ours = token_coefficients(cell, policy, reference, behaviour, advantage=advantage, beta=0.4)
        close(ours, loss_coefficients(ppo, policy, reference, behaviour))


def live(logp, old_logp):
    return (logp - old_logp).exp()


def test_live_and_detached_ratios():
    policy, reference, behaviour = triple(4, 1)
    reverse, forward = (exact_kl_gradient(policy, reference, d) for d in ("reverse", "forward"))

    def k(n, logp, ref_logp):
        ell = logp - ref_logp
        return {1: ell, 2: ell**2 / 2, 3: torch.exp(-ell) - 1 + ell}[n]

    def coefficients(n, detach):
        def loss(logp, ref_logp, old_logp):
            ratio = live(logp, old_logp)
            return (ratio.detach() if detach else ratio) * k(n, logp, ref_logp)

        return loss_coefficients(loss, policy, reference, behaviour)

    def mean(n, detach):
        return gradient_moments(coefficients(n, detach), policy, behaviour)[0]

    close(coefficients(3, detach=False), coefficients(2, detach=True))  # sample by sample
    close(mean(1, detach=False), reverse)  # in expectation
    assert not torch.allclose(coefficients(1, detach=False), coefficients(2, detach=True))
    assert not torch.allclose(mean(2, detach=False), reverse, rtol=1e-2)
    close(mean(1, detach=True), torch.zeros(4), 1e-15)
    close(mean(3, detach=True), forward)


def test_report_on_pure_noise_and_on_nothing():
    policy, reference, _ = triple()
    noise = gradient_report(Cell("k1"), policy, reference)
    assert (noise.cosine, noise.noise) == (0.0, math.inf)
    assert noise.relative_error == pytest.approx(1)
    assert noise.variance > 0.1
    nothing = gradient_report(Cell("none"), policy, reference)
    assert (nothing.norm, nothing.variance, nothing.noise, nothing.cosine) == (0, 0, 0, 0)
    same = gradient_report(Cell(), policy, policy)
    assert (same.relative_error, same.cosine) == (0, 0)
    assert same.bias < 1e-15


def test_report_judges_a_loss_function_as_it_judges_a_configuration():
    policy, reference, behaviour = triple()
    by_config = gradient_report(Cell("k3"), policy, reference, behaviour, beta=0.5)
    by_loss = gradient_report(
        lambda logp, ref_logp, old_logp: torch.exp(ref_logp - logp) - 1 + logp - ref_logp,
        policy,
        reference,
        behaviour,
        beta=0.5,
    )
    close(by_loss.expected, by_config.expected)
    assert by_loss.variance == pytest.approx(by_config.variance, rel=1e-12)
    assert by_loss.target_norm == pytest.approx(0.5 * float(exact_kl_gradient(policy, reference).norm()))
    detached = loss_coefficients(lambda logp, ref_logp, old_logp: (logp - ref_logp).detach(), policy, reference)
    assert not detached.any()
    with pytest.raises(ValueError, match="not to a loss function"):
        gradient_report(lambda *x: x[0], policy, reference, bandit=True)


def test_k3_in_reward_is_no_kl_at_all():
    policy, reference, _ = triple()
    for direction in ("reverse", "forward"):
        report = gradient_report(
            Cell("k3", placement="reward", credit="return"), policy, reference, direction=direction
        )
        assert report.relative_error > 0.3
    logp, ref_logp = (p.logp(p.responses()).detach() for p in (policy, reference))
    close(
        token_coefficients(Cell("k3", placement="reward"), policy, reference),
        torch.exp(ref_logp - logp) - 1 + logp - ref_logp,
    )


class Bounded:
    """What a user might register: tanh(ℓ) descended, its integral reported."""

    def value(self, logp, ref_logp):
        return torch.log(torch.cosh(logp - ref_logp))

    def coefficient(self, logp, ref_logp):
        return torch.tanh(logp - ref_logp)


def test_a_users_estimator_as_an_object_and_by_name():
    from kl_plugins import KLEstimator, register_estimator

    register_estimator("lab_test_bounded")(type("Registered", (Bounded, KLEstimator), {}))
    policy, reference, _ = triple()
    by_object = expected_gradient(Cell(Bounded()), policy, reference)
    close(expected_gradient(KLConfig(estimator="lab_test_bounded"), policy, reference), by_object)
    value, coefficient = estimator_curve("lab_test_bounded", [0.0, 1.0])
    close(value, [0, math.log(math.cosh(1))])
    close(coefficient, [0, math.tanh(1)])


def test_bounded_coefficient():
    policy, reference, _ = triple()
    config = KLConfig(coefficient_bound=0.5)
    plain = token_coefficients(Cell(), policy, reference)
    close(token_coefficients(config, policy, reference), 0.5 * torch.tanh(plain / 0.5))


def test_curves_of_the_paper_at_a_few_points():
    log_ratio = [-2.0, 0.0, 2.0]
    for name, value, coefficient in [
        ("k1", log_ratio, [1, 1, 1]),
        ("k2", [2, 0, 2], log_ratio),
        ("k3", [math.e**2 - 3, 0, math.e**-2 + 1], [1 - math.e**2, 0, 1 - math.e**-2]),
        ("mse", None, [math.exp(-5) - math.exp(-3), 0, math.exp(-1) - math.exp(-3)]),
    ]:
        curve = estimator_curve(name, log_ratio, ref_logp=-3.0)
        close(curve[1], coefficient)
        if value is not None:
            close(curve[0], value)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "mse"])
def test_coefficient_is_the_derivative_of_the_value(estimator):
    logp = torch.tensor([-0.3, -2.0, -5.0], dtype=torch.float64, requires_grad=True)
    ref_logp = torch.tensor([-1.0, -1.5, -5.0], dtype=torch.float64)
    slope = torch.autograd.grad(estimator_value(estimator, logp, ref_logp).sum(), logp)[0]
    if estimator == "mse":  # not of its value: of the objective ½Σ(π - π_ref)², per unit of probability
        slope = torch.autograd.grad((logp.exp() - ref_logp.exp()).square().sum() / 2, logp)[0] / logp.detach().exp()
    close(slope, estimator_coefficient(estimator, logp, ref_logp))


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (dict(credit="tokens"), "credit 'tokens'"),
        (dict(ratio="word"), "ratio 'word'"),
        (dict(correction="trunc"), "correction 'trunc'"),
        (dict(form="joint"), "form 'joint'"),
        (dict(placement="both"), "placement 'both'"),
        (dict(estimator="k9"), "k9"),
    ],
)
def test_unknown_settings(axes, message):
    with pytest.raises(ValueError, match=message):
        expected_gradient(Cell(**axes), HALF, QUARTER)


def test_other_errors():
    with pytest.raises(ValueError, match="direction 'both'"):
        exact_kl_gradient(HALF, QUARTER, "both")
    with pytest.raises(ValueError, match="advantage must be"):
        expected_gradient(Cell(form="combined"), HALF, QUARTER, advantage=torch.zeros(3))


CELLS = [
    dict(estimator=estimator, correction=correction, ratio=ratio, credit=credit)
    for estimator in ("k1", "k2", "k3", "mse", "none")
    for correction in ("none", "is", "clip")
    for ratio in ("token", "sequence")
    for credit in ("token", "return", "sequence")
]


@pytest.mark.parametrize("axes", CELLS, ids=lambda axes: "-".join(axes.values()))
def test_the_head_descends_what_the_lab_says(axes):
    policy, reference, behaviour = triple(3, 3, seed=4)
    config = KLConfig(**axes, ratio_cap=1.3, clip_low=0.1, clip_high=0.25, allow_vacuous=True)

    def head(logp, ref_logp, old_logp):
        return kl_head(logp, ref_logp, mask=torch.ones_like(logp), config=config, old_logp=old_logp)

    judged = loss_coefficients(head, policy, reference, behaviour)
    close(judged, token_coefficients(config, policy, reference, behaviour))


def test_the_lab_shares_no_code_with_what_it_judges():
    allowed = {"kl_plugins.lab", "kl_plugins.lab.policy", "kl_plugins.lab.gradients", "kl_plugins.lab.surrogates"}
    allowed |= {"kl_plugins.lab.values", "kl_plugins.lab.variance"}
    seen = set()
    for file in pathlib.Path(kl_plugins.lab.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = (
                    {f"{node.module}.{a.name}" for a in node.names} if node.module == "kl_plugins" else {node.module}
                )
            elif isinstance(node, ast.Import):
                names = {a.name for a in node.names}
            else:
                continue
            seen |= {name for name in names if name.startswith("kl_plugins")}
    assert seen - allowed == {"kl_plugins.get_estimator"}
