"""verl's own KL and configuration, as installed."""

import inspect
import json
import math

import pytest
import torch

from kl_plugins.audit import frameworks, judge
from kl_plugins.audit.read import read
from kl_plugins.launch.plan import LaunchError
from kl_plugins.launch.recipes import list_recipes

if frameworks.version("verl") is None:
    pytest.skip("verl is not installed in this environment", allow_module_level=True)

ACTOR = "actor_rollout_ref.actor"
# What verl's documentation of GRPO tells people to set.
USUAL = f"algorithm.adv_estimator=grpo {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=low_var_kl"
ONE_UPDATE = "data.train_batch_size=256"


def audited(kl_plugins, words, expect=0):
    return json.loads(kl_plugins(f"audit --json {words}", expect=expect))


def codes(data, severity):
    return {f["code"] for f in data["findings"] if f["severity"] == severity}


def test_the_usual_grpo(kl_plugins):
    """The issue's own criterion: forward KL, no importance weight, and where the clamp kills the gradient."""
    data = audited(kl_plugins, f"-- {USUAL}")
    (part,) = data["parts"]
    assert part["descends"] == "forward"
    assert part["importance_weight"] is False
    (low, dead_below), (dead_above, high) = part["zero_gradient"]
    assert (low, high) == ("-inf", "inf")
    # The clamp at 10 is reached where exp(-l) - 1 + l = 10.
    for edge in (dead_below, dead_above):
        assert math.exp(-edge) - 1 + edge == pytest.approx(10, abs=1e-4)
    assert codes(data, "wrong") == {"objective", "off_policy"}
    assert "clamp" in codes(data, "warning")
    row = data["on_policy"]["this one"]
    assert row["forward_error"]["high"] < 1e-9
    assert row["reverse_error"]["median"] > 0.1
    text = " ".join(kl_plugins(f"audit --strict -- {USUAL}", expect=1).split())
    for said in (
        "forward KL, KL(pi_ref || pi) (16), (59), per token, without importance weight",
        "exactly 0 where log(pi/pi_ref) < -2.61",
        "where log(pi/pi_ref) > 11.00",
        "4 updates a batch without importance weight",
        "The gradient is NOT the one named.",
    ):
        assert said in text


def test_verls_own_function_is_judged_not_the_plugins():
    from verl.trainer.ppo import core_algos

    import kl_plugins.verl  # noqa: F401  wraps verl's function in this process

    assert inspect.unwrap(core_algos.kl_penalty) is not core_algos.kl_penalty
    assert frameworks._verl_kl_penalty() is inspect.unwrap(core_algos.kl_penalty)


def test_a_plugin_that_did_not_load_cannot_train_silently():
    """Case 24: verl alone refuses the plugin's KL type, and so does the audit of a recipe without the block."""
    with pytest.raises(ValueError, match="knows no KL named 'kl_plugins'"):
        frameworks.own_loss("verl", "kl_plugins")
    with pytest.raises(LaunchError, match="needs the plugin's block"):
        read(None, [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=kl_plugins"])


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        ("kl", "nothing"), ("k1", "nothing"), ("k2", "reverse"), ("mse", "reverse"), ("k3", "forward"),
        ("low_var_kl", "forward"), ("k3+", "reverse"), ("k1+", "reverse"), ("abs", "other"),
    ],
)  # fmt: skip
def test_own_names(name, objective):
    loss = frameworks.own_loss("verl", name)
    assert judge.descends(loss) == objective
    assert not judge.weighted(loss)
    clamped = name in ("k3", "low_var_kl")
    assert bool(judge.dead_zones(loss)) == clamped


def test_own_values_off_policy():
    """Case 10: the value that verl reports is of the policy that sampled; the weight would correct it."""
    policy, reference, old = (
        torch.tensor([p], dtype=torch.float64).log() for p in ([0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.4, 0.4, 0.2])
    )
    k3 = frameworks.own_loss("verl", "low_var_kl")(policy, reference, old)
    assert (old.exp() * k3).sum().item() == pytest.approx(0.1194877, abs=1e-7)
    assert (old.exp() * (policy - old).exp() * k3).sum().item() == pytest.approx(0.0851228, abs=1e-7)


@pytest.mark.parametrize("recipe", [r.name for r in list_recipes() if r.framework == "verl"])
@pytest.mark.parametrize("profile", [None, "cpu", "node"])
def test_shipped_recipes_descend_what_they_say(recipe, profile):
    setting = read(recipe, profile=profile)
    (part,) = setting.parts
    assert part.config is not None
    named = {"k1": "reverse", "k2": "reverse", "k3": "forward"}[part.config.estimator]
    loss = setting.loss(part)
    assert judge.descends(loss) == named
    assert judge.dead_zones(loss) == []
    if part.place == "loss":
        assert judge.weighted(loss) == (part.config.correction != "none")
    assert not [finding for finding in setting.findings if finding.severity == "wrong"]


@pytest.mark.parametrize("recipe", ["verl/grpo_k2", "verl/grpo_k3", "verl/ppo_k1_in_reward"])
def test_shipped_recipes_pass_strict(kl_plugins, recipe):
    data = audited(kl_plugins, f"--strict {recipe}")
    assert data["gradient_is_the_one_named"] is True
    assert data["parts"][0]["plugin"] is not None


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=kl {ONE_UPDATE}", {"vacuous"}),
        (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k3 {ONE_UPDATE}", {"objective"}),
        (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k2", {"off_policy"}),
        ("algorithm.use_kl_in_reward=True algorithm.kl_penalty=low_var_kl", {"reward_estimator"}),
        (
            f"algorithm.use_kl_in_reward=True {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k2 {ONE_UPDATE}",
            {"double"},
        ),
        (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k2 {ONE_UPDATE} +kl.estimator=k2", {"ignored_block"}),
        (
            f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k2 {ONE_UPDATE} +{ACTOR}.policy_loss.kl.estimator=k2",
            {"ignored_block"},
        ),
        (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k2 {ONE_UPDATE} {ACTOR}.kl_loss_coef=-0.1", {"beta"}),
        (
            f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k3+ {ONE_UPDATE} actor_rollout_ref.rollout.temperature=0",
            {"temperature"},
        ),
    ],
)
def test_misconfigurations(kl_plugins, words, wrong):
    data = audited(kl_plugins, f"--strict -- {words}", expect=1)
    assert codes(data, "wrong") == wrong


@pytest.mark.parametrize(
    "words",
    [
        f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k3+ {ONE_UPDATE}",
        f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k2 {ONE_UPDATE}",
        "algorithm.use_kl_in_reward=True",
        "python -m verl.trainer.main_ppo algorithm.use_kl_in_reward=True",
    ],
)
def test_reverse_kl_of_verls_own_passes(kl_plugins, words):
    data = audited(kl_plugins, f"--strict -- {words}")
    assert data["parts"][0]["descends"] == "reverse"


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k2 {ACTOR}.kl_loss_coef=0", "beta"),
        (f"{USUAL} actor_rollout_ref.rollout.top_p=0.9", "sampler"),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.target_kl=0", "controller"),
        ("algorithm.use_kl_in_reward=True algorithm.lam=0.95", "credit"),
        (USUAL, "clamp"),
    ],
)
def test_warnings(kl_plugins, words, warning):
    assert warning in codes(audited(kl_plugins, f"-- {words}"), "warning")


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("algorithm.use_kl_in_reward=True", "double"),
        (f"{ACTOR}.use_kl_loss=False", "no_kl"),
        (f"{ACTOR}.kl_loss_type=k3", "contradiction"),
        ("kl.placement=reward kl.estimator=k1", "contradiction"),
    ],
)
def test_recipes_overridden_into_a_contradiction(kl_plugins, words, wrong):
    data = audited(kl_plugins, f"--strict verl/grpo_k2 {words}", expect=1)
    assert wrong in codes(data, "wrong")


@pytest.mark.parametrize(("correction", "wrong"), [("none", {"off_policy"}), ("clip", set()), ("is", set())])
def test_several_updates_a_batch_need_the_weight(kl_plugins, correction, wrong):
    words = f"verl/grpo_k2 --kl_correction {correction} {ACTOR}.ppo_mini_batch_size=8"
    data = audited(kl_plugins, f"--strict {words}", expect=int(bool(wrong)))
    assert data["updates"] == 4
    assert codes(data, "wrong") == wrong


def test_combined_recipe(kl_plugins):
    assert "combined" in codes(audited(kl_plugins, "verl/grpo_k2 kl.form=combined"), "warning")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"-- {ACTOR}.kl_estimator=k2", "kl_loss_type"),  # case 27
        (f"verl/grpo_k2 {ACTOR}.kl_estimator=k2", "kl.estimator"),
        ("verl/grpo_k2 kl.estimater=k2", "did you mean kl.estimator"),
        ("verl/grpo_k2 kl.estimator=k22", "did you mean 'k2'"),
        ("verl/grpo_k2 kl.estimator=k1", "pure noise (10)"),
        (f"-- {ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=low_var_k", "did you mean low_var_kl"),
        ("-- --algo.kl.use_loss", "OpenRLHF is not installed"),
        ("verl/grpo_k2 -- python -m openrlhf.cli.train_ppo_ray", "is a recipe of verl"),
        ("-- python -m verl.trainer.main_ppo --nproc 8", "no option of verl's command"),
    ],
)
def test_refusals(kl_plugins, words, said):
    if "OpenRLHF is not installed" in said and frameworks.version("openrlhf"):
        pytest.skip("OpenRLHF is installed here")
    assert said in " ".join(kl_plugins(f"audit {words}", expect=2).split())


def test_effective_beta_and_norm(kl_plugins):
    def beta(words):
        data = audited(kl_plugins, f"-- {words}")
        return next(f["text"] for f in data["findings"] if f["code"] == "beta")

    reward = "algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.1"
    assert "effective beta is beta/std, 0.2 at std 0.5" in beta(f"algorithm.adv_estimator=grpo {reward}")
    plain = f"algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False {reward}"
    assert "divides by no standard deviation" in beta(plain)
    loss = f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_type=k2 {ACTOR}.kl_loss_coef=0.1 algorithm.adv_estimator=grpo"
    assert "in units of the reward it is beta*std, 0.05 at std 0.5" in beta(loss)


def test_advantages_are_verls():
    """Where a KL reward goes and what divides it, against verl's own functions."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from kl_plugins.audit.read_verl import ADVANTAGES

    groups = torch.tensor([0, 0, 1, 1]).numpy()
    mask = torch.ones(4, 3)
    rewards = torch.tensor([[-1.0, 0, 0], [0, 0, 0.5], [0.25, 0, 0], [0, 0, 1]])

    def advantages(name, scale):
        function = inspect.unwrap(get_adv_estimator_fn(name))
        given = {
            "token_level_rewards": rewards * scale, "response_mask": mask, "index": groups, "values": torch.zeros(4, 3),
            "gamma": 1.0, "lam": 1.0, "reward_baselines": torch.zeros(4), "config": {"gamma": 1.0},
        }  # fmt: skip
        if name == "reinforce_plus_plus":
            given["config"] = type("Config", (), {"gamma": 1.0})()
        wanted = inspect.signature(function).parameters
        return function(**{k: v for k, v in given.items() if k in wanted})[0]

    for name in ("gae", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "remax"):
        credit, norm = ADVANTAGES[name]
        once, tenfold = advantages(name, 1.0), advantages(name, 10.0)
        spread_evenly = bool(torch.isclose(once[0, 0], once[0, 1]))  # the penalty sits on the first token alone
        assert spread_evenly == (credit == "sequence"), name
        unchanged = torch.allclose(once, tenfold, atol=1e-3)
        assert unchanged == (norm != "none"), name
