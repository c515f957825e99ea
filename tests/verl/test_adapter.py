"""The plugin inside verl's real ppo_loss, on hand-made batches, against numbers worked out independently."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("verl", reason="needs the verl environment")

import crossframework as shared
from oracle import head_reference
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig
from verl.workers.utils import losses

from kl_plugins import KLConfig, drift
from kl_plugins.verl import KLPolicyLossConfig, adapter, trainer

PROMPT = 2
LENGTHS = [3, 1, 4]  # responses
MASKS = [[1, 1, 1], [1], [1, 0, 1, 1]]  # a tool token in the third
BETA = 0.3


def rows(seed, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return [-torch.rand(n, generator=generator, dtype=torch.float64) * scale - 0.05 for n in LENGTHS]


LOGP, OLD, REF = rows(0), rows(1), rows(2)
ADVANTAGES = [r + 1.5 for r in rows(3)]
WEIGHTS = [r.neg() / 2 for r in rows(4)]


def padded(ragged):
    return torch.nn.utils.rnn.pad_sequence([torch.as_tensor(r) for r in ragged], batch_first=True)


def nested(ragged):
    return torch.nested.as_nested_tensor([torch.as_tensor(r) for r in ragged], layout=torch.jagged)


def actor(kl=None, policy_loss=None, **axes):
    if policy_loss is None:
        policy_loss = PolicyLossConfig() if kl is None else KLPolicyLossConfig(kl=kl)
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        use_dynamic_bsz=True,
        optim=FSDPOptimizerConfig(lr=1e-6),
        policy_loss=policy_loss,
        **{
            "use_kl_loss": True,
            "kl_loss_coef": BETA,
            "kl_loss_type": "low_var_kl" if kl is None else "kl_plugins",
            **axes,
        },
    )


def batch(form, *, ref=True, weights=False, tokens=None, size=None, **beside):
    """(model_output, data, leaf): the leaf is log pi_theta of every position, prompt included, as models give it."""
    flat = []
    for row in LOGP:  # the engine's row: position t scores token t + 1, so the response sits one to the left
        flat.append(torch.cat([torch.full((PROMPT - 1,), -9.0, dtype=torch.float64), row, torch.tensor([-9.0])]))
    leaf = torch.cat(flat).requires_grad_()
    wrap = nested if form == "nested" else padded
    columns = {"response_mask": wrap(MASKS), "old_log_probs": wrap(OLD), "advantages": wrap(ADVANTAGES)}
    if ref:
        columns["ref_log_prob"] = wrap(REF)
    if weights:
        columns["rollout_is_weights"] = wrap(WEIGHTS)
    columns["prompts"] = wrap([torch.zeros(PROMPT, dtype=torch.long)] * 3)
    columns["responses"] = wrap([torch.zeros(n, dtype=torch.long) for n in LENGTHS])
    if form == "padded":
        columns["attention_mask"] = padded([torch.ones(PROMPT + n, dtype=torch.long) for n in LENGTHS])
    data = TensorDict(columns, batch_size=[3])
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=size, **beside)
    lengths = torch.tensor([0, *(PROMPT + n for n in LENGTHS)]).cumsum(0)
    return {"log_probs": torch.nested.nested_tensor_from_jagged(leaf, offsets=lengths)}, data, leaf


def run(config, form="nested", **columns):
    """(loss, metrics, gradient [B, T] of the loss to log pi_theta of the responses)."""
    output, data, leaf = batch(form, **columns)
    loss, metrics = losses.ppo_loss(config, output, data)
    loss.backward()
    gradient, start = [], 0
    for n in LENGTHS:
        gradient.append(leaf.grad[start + PROMPT - 1 : start + PROMPT - 1 + n])
        start += PROMPT + n
    return loss.detach(), metrics, padded(gradient)


def policy_gradient(config_axes, **columns):
    """verl's policy term alone: same loss with beta 0, so that the KL's part is the difference."""
    return run(actor(kl_loss_coef=0.0, **config_axes), **columns)


MASK = padded(MASKS)
CELLS = [
    dict(estimator="k2"),
    dict(estimator="k3", correction="is"),
    dict(estimator="k2", correction="clip"),
    dict(estimator="k3", correction="clip", ratio="sequence", credit="return", report="k1"),
    dict(estimator="mse", correction="is", credit="sequence", ratio_cap=2.0),
    dict(estimator="none"),
    dict(estimator="k2", coefficient_bound=0.5),
]


@pytest.mark.parametrize("form", ["nested", "padded"])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("axes", CELLS)
def test_decoupled_value_and_gradient(axes, weights, form):
    loss, metrics, gradient = run(actor(axes), form, weights=weights)
    pg_loss, _, pg_gradient = policy_gradient({}, form=form, weights=weights)
    value, coefficient = head_reference(
        padded(LOGP), padded(REF), MASK, padded(OLD), padded(WEIGHTS) if weights else None, **axes
    )
    kl = value.sum() / MASK.sum()  # token-mean, verl's default
    torch.testing.assert_close(loss - pg_loss, BETA * kl, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient - pg_gradient, BETA * coefficient / MASK.sum(), rtol=1e-9, atol=1e-12)
    assert metrics["kl_loss"].aggregate() == pytest.approx(kl.item())
    assert metrics["kl/k1"].aggregate() == pytest.approx(
        ((padded(LOGP) - padded(REF)) * MASK).sum().item() / MASK.sum()
    )
    assert {"kl/k2", "kl/k3", "kl/coef_mean", "kl/coef_max", "kl/ess", "kl/clip_removed", "kl/chi2"} <= set(metrics)


@pytest.mark.parametrize("axes", [dict(estimator="k2"), dict(estimator="k2", form="combined")])
def test_the_controllers_beta_takes_the_place_of_the_configurations(axes):
    config = actor(axes)
    loss, metrics, gradient = run(config, **{trainer.BETA: 3 * BETA})
    wanted_loss, wanted, wanted_gradient = run(actor(axes, kl_loss_coef=3 * BETA))
    assert (loss, metrics["kl_coef"], config.kl_loss_coef) == (wanted_loss, wanted["kl_coef"], BETA)
    assert metrics["kl_coef"] == 3 * BETA
    torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=0)


def test_a_trainer_that_follows_no_schedule_is_found_out():
    scheduled = dict(estimator="k2", reference={"reset_every": 3})
    with pytest.raises(RuntimeError, match="would follow neither kl.controller nor kl.reference"):
        run(actor(scheduled))
    loss, _, _ = run(actor(scheduled), **{trainer.BETA: BETA})
    assert loss == run(actor(dict(estimator="k2")))[0]


def run_shared(config, rollout, mode):
    """Loss and gradient [3, 5] of verl's ppo_loss on the batch that OpenRLHF's adapter is tested with as well."""
    rows, columns = shared.LOGP.shape
    leaf = torch.nn.functional.pad(shared.LOGP.double(), (PROMPT - 1, 1)).flatten().requires_grad_()
    offsets = torch.arange(rows + 1) * (PROMPT + columns)
    data = TensorDict(
        {
            "response_mask": shared.MASK,
            "old_log_probs": shared.OLD.double(),
            "ref_log_prob": shared.REF.double(),
            "advantages": torch.zeros(rows, columns, dtype=torch.float64),
            "prompts": torch.zeros(rows, PROMPT, dtype=torch.long),
            "responses": torch.zeros(rows, columns, dtype=torch.long),
            "attention_mask": torch.ones(rows, PROMPT + columns, dtype=torch.long),
            **({"rollout_is_weights": shared.ROLLOUT_WEIGHTS.double()} if rollout else {}),
        },
        batch_size=[rows],
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=None, global_batch_size=None)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(leaf, offsets=offsets)}
    loss, _ = losses.ppo_loss(actor(config, kl_loss_coef=shared.BETA, loss_agg_mode=mode), output, data)
    loss.backward()
    return loss.detach(), leaf.grad.view(rows, -1)[:, PROMPT - 1 : -1]


@pytest.mark.parametrize("rollout", [False, True], ids=["", "sampler"])
@pytest.mark.parametrize("name", shared.CONFIGS)
def test_same_batch_as_openrlhf(name, rollout):
    """Each framework against one file: the same matrix and gradient, and where aggregation differs, by FACTORS."""
    value, gradient = shared.expected(name, rollout)
    loss, per_token = run_shared(shared.CONFIGS[name], rollout, "token-mean")
    torch.testing.assert_close(loss, shared.BETA * (value * shared.token_mean()).sum(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(per_token, shared.BETA * gradient * shared.token_mean(), rtol=1e-6, atol=1e-7)
    _, per_sequence = run_shared(shared.CONFIGS[name], rollout, "seq-mean-token-mean")
    torch.testing.assert_close(per_sequence, per_token * shared.FACTORS, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"])
def test_aggregation_stays_verls(mode):
    loss, _, gradient = run(actor(dict(estimator="k3"), loss_agg_mode=mode), tokens=11.0, size=5)
    pg_loss, _, pg_gradient = policy_gradient({"loss_agg_mode": mode}, tokens=11.0, size=5)
    value, coefficient = head_reference(padded(LOGP), padded(REF), MASK, estimator="k3")

    def aggregate(matrix):
        info = dict(dp_size=1, batch_num_tokens=11.0, global_batch_size=5)
        return core_algos.agg_loss(matrix, MASK, mode, **info)

    leaf = torch.zeros_like(value, requires_grad=True)
    aggregate(leaf).backward()
    torch.testing.assert_close(loss - pg_loss, BETA * aggregate(value))
    torch.testing.assert_close(gradient - pg_gradient, BETA * coefficient * leaf.grad)


@pytest.mark.parametrize("form", ["nested", "padded"])
@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo", "gpg"])
def test_combined_is_verls_own_loss_on_other_advantages(form, loss_mode):
    axes = dict(estimator="k2", form="combined", credit="return")
    loss, metrics, gradient = run(actor(policy_loss=KLPolicyLossConfig(loss_mode=loss_mode, kl=axes), kl=axes), form)
    _, pull = head_reference(padded(LOGP), padded(REF), MASK, estimator="k2", credit="return")

    leaf = padded(LOGP).requires_grad_()
    pg, _ = core_algos.get_policy_loss_fn(loss_mode)(
        old_log_prob=padded(OLD),
        log_prob=leaf,
        advantages=padded(ADVANTAGES) - BETA * pull,
        response_mask=MASK.bool(),
        loss_agg_mode="token-mean",
        config=actor(),
        rollout_is_weights=None,
    )
    pg.backward()
    torch.testing.assert_close(gradient, leaf.grad)
    value, _ = head_reference(padded(LOGP), padded(REF), MASK, estimator="k2")
    torch.testing.assert_close(loss, pg.detach() + BETA * value.sum() / MASK.sum())
    assert metrics["kl_loss"].aggregate() == pytest.approx((value.sum() / MASK.sum()).item())


def test_reward_placement_leaves_the_loss_alone_and_measures():
    loss, metrics, gradient = run(actor(dict(estimator="k1", placement="reward"), use_kl_loss=False))
    pg_loss, _, pg_gradient = run(actor(use_kl_loss=False))
    assert torch.equal(loss, pg_loss)
    assert torch.equal(gradient, pg_gradient)
    assert metrics["kl/k1"].aggregate() == pytest.approx(
        ((padded(LOGP) - padded(REF)) * MASK).sum().item() / MASK.sum()
    )


def test_reward_value_comes_from_the_registry():
    logp, ref_logp = padded(LOGP), padded(REF)
    assert torch.equal(core_algos.kl_penalty(logp, ref_logp, "kl_plugins:k1"), logp - ref_logp)
    with pytest.raises(ValueError, match="did you mean 'k1'"):
        core_algos.kl_penalty(logp, ref_logp, "kl_plugins:k11")
    with pytest.raises(ValueError, match="KLPolicyLossConfig"):
        core_algos.kl_penalty(logp, ref_logp, "kl_plugins")


BARE = """
import os, sys, torch
sys.argv = ["x"]
os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "{policy}"
from verl.trainer.ppo import core_algos
from verl.workers.utils import losses
sys.path.insert(0, {folder!r})
assert ("kl_plugins.verl" in sys.modules) == {loaded}, "plugin state"
logp = torch.linspace(-5, -0.1, 24, dtype=torch.float64).view(4, 6).requires_grad_()
ref = torch.linspace(-0.1, -6, 24, dtype=torch.float64).view(4, 6)
for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+", "low_var_kl+"):
    m = core_algos.kl_penalty(logp, ref, kind)
    (g,) = torch.autograd.grad(m.sum(), logp)
    print(kind, m.detach().flatten().tolist(), g.flatten().tolist())
"""


def bare(policy, loaded):
    code = BARE.format(policy=policy, loaded=loaded, folder=".")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [
        line for line in done.stdout.splitlines() if line.split(" ")[0] in ("kl", "k1", "abs", "k3+", "low_var_kl+")
    ]


def test_built_in_names_are_verls_own_bit_for_bit():
    alone, beside = bare("none", False), bare("auto", True)  # auto: through the installed entry point
    assert len(alone) == 5
    assert alone == beside


def test_without_a_kl_block_ppo_loss_is_verls_own():
    original = losses.ppo_loss.__wrapped__
    for kind in ("low_var_kl", "k1", "k2", "k3+"):
        output, data, leaf = batch("nested")
        loss, metrics = losses.ppo_loss(actor(kl_loss_type=kind), output, data)
        output2, data2, leaf2 = batch("nested")
        loss2, metrics2 = original(actor(kl_loss_type=kind), output2, data2)
        loss.backward()
        loss2.backward()
        assert torch.equal(loss, loss2)
        assert torch.equal(leaf.grad, leaf2.grad)
        assert set(metrics) == set(metrics2)


@pytest.mark.parametrize(
    ("kl", "axes", "words"),
    [
        (dict(estimator="k2"), dict(use_kl_loss=False), "kl.placement=loss needs .*use_kl_loss=True"),
        (dict(estimator="k1", placement="reward"), {}, "count the KL twice"),  # case 20
        (dict(estimator="k2"), dict(kl_loss_type="k3"), "two KL losses"),
        (dict(estimator="k2"), dict(kl_loss_coef=-1.0), "reward distance"),
    ],
)
def test_contradictions_are_refused_in_the_worker(kl, axes, words):
    with pytest.raises(ValueError, match=words):
        run(actor(kl, **axes))


def test_missing_reference_is_refused():
    with pytest.raises(ValueError, match="no ref_log_prob"):
        run(actor(dict(estimator="k2")), ref=False)


def test_misspelt_keys_and_estimators_suggest():  # case 27
    with pytest.raises(ValueError, match="unknown key kl.credits: did you mean 'credit'"):
        KLPolicyLossConfig(kl={"credits": "token"})
    with pytest.raises(ValueError, match="did you mean 'k2'"):
        KLPolicyLossConfig(kl={"estimator": "k2x"})
    with pytest.raises(ValueError, match="must be a mapping"):
        KLPolicyLossConfig(kl="k2")


def test_head_not_called_is_an_error(monkeypatch):  # case 24
    """A verl whose ppo_loss holds another kl_penalty would train with its own KL: stop at the first micro-batch."""
    monkeypatch.setattr(losses, "kl_penalty", core_algos.kl_penalty.__wrapped__)
    with pytest.raises(NotImplementedError):  # verl's own, of a kl_loss_type that it does not know
        run(actor(dict(estimator="k2")))
    with pytest.raises(RuntimeError, match="without calling kl_plugins' KL head"):
        run(actor(dict(estimator="k2"), kl_loss_type="low_var_kl"))


def test_twice_is_harmless():
    before = losses.ppo_loss
    adapter.install()
    assert losses.ppo_loss is before
    code = (
        "import verl, kl_plugins.verl; from verl.workers.utils import losses; "
        "print(losses.ppo_loss.__wrapped__.__code__.co_filename)"
    )
    env = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "kl_plugins.verl"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout.strip().endswith("verl/workers/utils/losses.py"), done.stderr  # wrapped once: next is verl's own


def test_failing_load_is_loud_and_leaves_nothing(monkeypatch):
    code = """
import logging, sys
from kl_plugins import drift
def broken(*a): raise drift.DriftError("verl 9.9.9: ppo_loss takes (x)")
drift.check = broken
import verl
from verl.workers.utils import losses
from verl.trainer.ppo import core_algos
assert not hasattr(losses.ppo_loss, "__kl_plugins__") and not hasattr(core_algos.kl_penalty, "__kl_plugins__")
assert "kl_plugins_combined" not in core_algos.POLICY_LOSS_REGISTRY
assert "kl_group_norm" not in core_algos.ADV_ESTIMATOR_REGISTRY
from hydra.utils import instantiate
try:
    instantiate({"_target_": "kl_plugins.verl.KLPolicyLossConfig", "kl": {"estimator": "k2"}})
except Exception as error:
    print("REFUSED", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "kl_plugins.verl did not load and changed nothing" in done.stderr
    assert "verl 9.9.9: ppo_loss takes (x)" in done.stderr
    assert "REFUSED" in done.stdout


def test_drift_is_refused_with_version_function_and_switch(monkeypatch):  # case 29
    monkeypatch.delenv(drift.SWITCH, raising=False)
    with pytest.raises(drift.DriftError, match=r"verl 0.9.2.*ppo_loss.*KL_PLUGINS_ALLOW_UNKNOWN=1"):
        drift.check("verl", "0.9.2", adapter.WRAPPED)
    monkeypatch.setenv(drift.SWITCH, "1")
    drift.check("verl", "0.9.2", adapter.WRAPPED)


def test_clipped_group_norm():
    rewards = torch.zeros(4, 3)
    rewards[:, 2] = torch.tensor([0.99999, 1.00001, 0.99999, 1.00001])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 1]])
    estimate = core_algos.get_adv_estimator_fn("kl_group_norm")
    advantages, returns = estimate(token_level_rewards=rewards, response_mask=mask, config={}, index=["a"] * 4)
    torch.testing.assert_close(advantages[0], torch.tensor([-1e-4, -1e-4, -1e-4]), rtol=0.01, atol=1e-7)
    assert advantages[1, 1] == 0
    assert torch.equal(advantages, returns)
    wide = {"kl_group_norm": {"std_min": 1e-9}}
    advantages, _ = estimate(token_level_rewards=rewards, response_mask=mask, config=wide, index=["a"] * 4)
    assert advantages[1, 0].item() == pytest.approx(0.866, rel=0.02)
    with pytest.raises(ValueError, match="unknown keys"):
        estimate(token_level_rewards=rewards, response_mask=mask, config={"kl_group_norm": {"min": 1}}, index=["a"] * 4)


def test_registry_is_filled_in_a_remote_worker(monkeypatch, tmp_path):  # case 25
    import ray

    monkeypatch.chdir(tmp_path)  # Ray puts the driver's folder on its workers' path: not the repository

    @ray.remote
    def probe():
        import verl  # noqa: F401
        from verl.trainer.ppo import core_algos
        from verl.workers.utils import losses

        return hasattr(losses.ppo_loss, "__kl_plugins__"), "kl_plugins_combined" in core_algos.POLICY_LOSS_REGISTRY

    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        assert ray.get(probe.remote(), timeout=120) == (True, True)
    finally:
        ray.shutdown()


def test_config_is_kept_typed():
    config = KLPolicyLossConfig(kl={"estimator": "k3", "correction": "clip"})
    assert config.kl == KLConfig(estimator="k3", correction="clip")
    assert config.loss_mode == "vanilla"
    combined = KLPolicyLossConfig(loss_mode="gspo", kl={"form": "combined"})
    assert (combined.loss_mode, combined.combined_loss_mode) == ("kl_plugins_combined", "gspo")
