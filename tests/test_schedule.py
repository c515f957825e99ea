"""The controllers against numbers worked by hand, their bounds against anything, and when resets are due."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kl_plugins.schedule import (
    Controller,
    Reference,
    Run,
    Schedule,
    State,
    describe,
    forget_moments,
    read_block,
)

FINITE = st.floats(-1e6, 1e6)


def ziegler(**changes):
    return Schedule(Controller("ziegler", **{"target": 0.1, "horizon": 1000, **changes}))


def log(**changes):
    return Schedule(Controller("log", **{"target": 0.1, "gain": 0.5, "decay": 0.5, **changes}))


@pytest.mark.parametrize(
    ("kl", "beta"),
    [
        (0.1, 0.2),  # at the target nothing moves
        (0.11, 0.2 * (1 + 0.1 * 0.256)),
        (5.0, 0.2 * (1 + 0.2 * 0.256)),  # the error is clipped to 20 %
        (-3.0, 0.2 * (1 - 0.2 * 0.256)),
    ],
)
def test_ziegler_by_hand(kl, beta):
    schedule = ziegler()
    assert schedule.advance(schedule.start(0.2), kl, 256).beta == pytest.approx(beta, rel=1e-12)


def test_ziegler_agrees_with_the_controller_of_the_installed_framework():
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    theirs, schedule = core_algos.AdaptiveKLController(0.2, 0.1, 1000), ziegler()
    state = schedule.start(0.2)
    for kl in (0.02, 0.105, 0.4, 0.09, -0.01):
        theirs.update(kl, 128)
        state = schedule.advance(state, kl, 128)
        assert state.beta == pytest.approx(theirs.value, rel=1e-12)


def test_ziegler_with_a_horizon_below_a_batch_stays_within_its_bounds():  # case 22
    schedule = ziegler(horizon=1, beta_min=0.01, beta_max=0.5)  # the frameworks' would give 0.2 * (1 - 51.2)
    assert schedule.advance(schedule.start(0.2), 0.0, 256).beta == 0.01
    assert schedule.advance(schedule.start(0.2), 1.0, 256).beta == 0.5


def test_log_by_hand():
    schedule = log()
    state = schedule.advance(schedule.start(0.2), 0.0, 256)  # policy and reference are one: no news
    assert state.beta == 0.2
    state = schedule.advance(state, 0.2, 256)  # average 0.2, corrected for its start
    assert state.beta == pytest.approx(0.2 * 2**0.5, rel=1e-12)
    state = schedule.advance(state, 0.05, 256)  # average (0.5 * 0.2 + 0.05) / (0.5 + 1) = 0.1
    assert state.beta == pytest.approx(0.2 * 2**0.5, rel=1e-12)


def test_log_of_a_kl_at_or_below_zero_is_a_bounded_step_down():
    schedule = log()
    for kl in (0.0, -1.0):
        after = schedule.advance(State(0.2, since_reset=1), kl, 1)
        assert after.beta == pytest.approx(0.2 * math.exp(-0.5), rel=1e-12)


@given(
    st.sampled_from([ziegler(beta_min=0.01, beta_max=2.0), log(beta_min=0.01, beta_max=2.0)]),
    st.lists(st.tuples(FINITE, st.integers(1, 10**6))),
)
def test_beta_stays_within_its_bounds_whatever_is_measured(schedule, steps):
    state = schedule.start(0.2)
    for kl, responses in steps:
        state = schedule.advance(state, kl, responses)
        assert 0.01 <= state.beta <= 2.0


@pytest.mark.parametrize("make", [ziegler, log])
def test_a_kl_that_follows_beta_is_brought_to_the_target(make):
    schedule = make(target=0.1)
    state = schedule.start(0.01)
    for _ in range(2000):
        state = schedule.advance(state, 0.02 / state.beta, 100)
    assert 0.02 / state.beta == pytest.approx(0.1, rel=0.05)


def test_fixed_is_fixed():
    schedule = Schedule()
    assert schedule.constant
    assert schedule.advance(schedule.start(0.0), 7.0, 8).beta == 0.0
    assert schedule.describe() == ""


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_no_number_stops_the_run(kl):
    with pytest.raises(ValueError, match=f"the KL of the step is {kl}"):
        Schedule().advance(State(0.1), kl, 8)


def resets(reference, kls):
    """The steps after which the reference is replaced."""
    schedule, state, steps = Schedule(reference=reference), State(0.1), []
    for step, kl in enumerate(kls, 1):
        after = schedule.advance(state, kl, 8)
        steps += [step] * (after.resets - state.resets)
        state = after
    return steps


def test_when_resets_are_due():
    assert resets(Reference(), [9.0] * 5) == []
    assert resets(Reference(reset_every=3), [0.0] * 7) == [3, 6]
    assert resets(Reference(reset_when_kl_above=0.5), [0.1, 0.5, 0.51, 0.1, 2.0]) == [3, 5]
    # A reset for the KL starts the count of steps anew.
    assert resets(Reference(reset_every=3, reset_when_kl_above=0.5), [0.6, 0.1, 0.1, 0.1, 0.1]) == [1, 4]


def test_a_reset_forgets_the_average_and_keeps_beta():
    schedule = Schedule(Controller("log", target=0.1), Reference(reset_every=3))
    state = schedule.advance(State(0.2, since_reset=1), 0.4, 8)
    assert state.kl_weight > 0
    after = schedule.advance(state, 0.4, 8)
    assert (after.kl_average, after.kl_weight, after.since_reset, after.resets) == (0.0, 0.0, 0, 1)
    assert after.beta > state.beta > 0.2


def test_a_run_goes_on_from_its_checkpoint():
    schedule = Schedule(Controller("log", target=0.1), Reference(reset_every=3))
    unbroken, kls = Run(schedule, 0.2), [0.0, 0.3, 0.2, 0.0, 0.3]
    told = [unbroken.step(kl, 8) for kl in kls]
    assert told == [False, False, True, False, False]
    broken = Run(schedule, 0.2)
    for kl in kls[:2]:
        broken.step(kl, 8)
    resumed = Run(schedule, 0.2)
    resumed.restore(broken.state.to_mapping())
    for kl in kls[2:]:
        resumed.step(kl, 8)
    assert resumed.state == unbroken.state
    assert resumed.metrics() == {"kl/beta": unbroken.value, "kl/reference_resets": 1.0}


def test_a_first_step_that_is_not_at_the_reference_says_so():  # case 19
    run = Run(Schedule(reference=Reference(reset_every=2)), 0.1)
    assert "its KL is 0.2647 nats a token, not about 0: they differ in weights, temperature" in run.warning(0.2646743)
    assert run.warning(-0.5)
    assert not run.warning(1e-3)
    run.step(0.0, 8)
    assert not run.warning(0.3)
    run.step(0.3, 8)  # a reset
    assert run.warning(0.3)


def test_a_fixed_beta_is_the_configurations_after_a_resume():
    run = Run(Schedule(), 0.3)
    run.restore(State(0.2, resets=2).to_mapping())
    assert (run.value, run.state.resets) == (0.3, 2)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimiser_that_forgot_does_what_a_new_one_does(make):
    options = {"lr": 0.1, **({"momentum": 0.9} if make is torch.optim.SGD else {})}

    def step(weight, optimizer):
        (weight - 3).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    used = torch.zeros(4, requires_grad=True)
    optimizer = make([used], **options)
    for _ in range(3):
        step(used, optimizer)
    fresh = used.detach().clone().requires_grad_()
    forget_moments(optimizer)
    step(used, optimizer)
    step(fresh, make([fresh], **options))
    torch.testing.assert_close(used, fresh, rtol=0, atol=0)


def test_state_survives_a_checkpoint_and_nothing_else_does():
    state = State(0.1, 0.2, 0.3, 4, 5)
    assert State.from_mapping(state.to_mapping()) == state
    for wrong in ({"beta": 0.1}, {**state.to_mapping(), "gamma": 1.0}, {**state.to_mapping(), "beta": "0.1"}):
        with pytest.raises(ValueError, match="saved state of the KL schedule"):
            State.from_mapping(wrong)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"controller": {"kind": "adaptive"}}, r"kl.controller.kind='adaptive': .*one of fixed, ziegler, log"),
        ({"controller": {"kind": "ziegler", "target": 0, "horizon": 10}}, "kl.controller.target=0 must be > 0"),
        ({"controller": {"kind": "ziegler", "target": 0.1, "horizon": 0}}, "kl.controller.horizon=0 must be > 0"),
        ({"controller": {"kind": "ziegler", "target": 0.1}}, "kl.controller.horizon=None must be > 0"),
        ({"controller": {"kind": "log"}}, "kl.controller.target=None must be > 0"),
        ({"controller": {"target": 0.1}}, "target=0.1 would do nothing with kl.controller.kind=fixed"),
        ({"controller": {"kind": "log", "target": 0.1, "horizon": 5}}, "horizon=5 would do nothing"),
        ({"controller": {"kind": "log", "target": 0.1, "gain": 0}}, "gain=0 must be > 0"),
        ({"controller": {"kind": "log", "target": 0.1, "decay": 1}}, r"decay=1 must be in \[0, 1\)"),
        ({"controller": {"beta_min": 0}}, "0 < beta_min <= beta_max"),
        ({"controller": {"kind": "log", "taget": 0.1}}, "unknown key kl.controller.taget: did you mean 'target'"),
        ({"controller": "log"}, "kl.controller='log' must be a mapping with kind"),
        ({"estimator": "none", "controller": {"kind": "log", "target": 0.1}}, "kl.estimator=none does not use"),
        ({"reference": {"reset_every": 0}}, "reset_every=0 must be a whole number"),
        ({"reference": {"reset_every": 1.5}}, "reset_every=1.5 must be a whole number"),
        ({"reference": {"reset_when_kl_above": -1}}, "reset_when_kl_above=-1 must be > 0"),
        ({"reference": {"reset_optimizer": True}}, "would do nothing"),
        ({"reference": {"reset_each": 3}}, "did you mean 'reset_every'"),
        ({"estimater": "k2"}, "did you mean 'estimator'"),
    ],
)
def test_what_is_refused(block, words):
    with pytest.raises(ValueError, match=words):
        read_block(block)


@pytest.mark.parametrize("value", ["0.1", True, math.nan])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="kl.controller.target=.* must be a finite number"):
        read_block({"controller": {"kind": "log", "target": value}})


@pytest.mark.parametrize("beta", [0.0, 1e-5, 11.0])
def test_a_beta_that_the_controller_may_not_have_is_refused(beta):
    with pytest.raises(ValueError, match=f"beta starts at {beta}, outside"):
        log().start(beta)


def test_the_block_in_a_sentence():
    block = {
        "estimator": "k2",
        "controller": {"kind": "log", "target": 0.05},
        "reference": {"reset_every": 100, "reset_optimizer": True},
    }
    said = describe(*read_block(block))
    assert "k2 as loss descends reverse KL" in said
    assert "Beta is moved to a KL of 0.05 nats a token (log-space, gain 0.1); " in said
    assert said.endswith("the reference becomes the policy every 100 steps, the optimiser with it.")
    assert describe(*read_block({})) == read_block({})[0].describe()
