"""What the plugin wraps in verl, and nothing else; a configuration without a ``kl`` block passes straight through.

- ``ppo_loss``: puts the micro-batch's old and rollout columns and its mask where the KL term can see them.
- ``kl_penalty``: returns :func:`kl_plugins.kl_head`'s matrix; verl aggregates, scales by ``kl_loss_coef`` and logs.
- ``validate_config``: refuses, in the driver, combinations that would not be what they say.
- ``Tracking.log``: verl prefixes a worker's metrics with ``actor/``; ours are logged as ``kl/``.
- ``PPOTrainer``: see :mod:`kl_plugins.verl.trainer`.

Shapes: ``[B, T]`` padded responses, as verl has them inside its loss.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import verl
import verl.utils.config
import verl.utils.tracking
import verl.workers.utils.losses as losses
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

from kl_plugins import drift
from kl_plugins.config import KLConfig
from kl_plugins.estimators import get_estimator
from kl_plugins.head import combined_advantages, head_terms
from kl_plugins.metrics import measure
from kl_plugins.post_import import after_import
from kl_plugins.schedule import describe, read_block
from kl_plugins.shaping import group_norm
from kl_plugins.verl import trainer
from kl_plugins.verl.config import COMBINED_LOSS, KL_TYPE

log = logging.getLogger("kl_plugins")

GROUP_NORM = "kl_group_norm"


def _kl_penalty_probe(kl_penalty) -> str | None:
    out = kl_penalty(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]]), "k2")
    return None if torch.allclose(out, torch.tensor([[0.125, 0.5]])) else f"gives {out.tolist()} for k2"


WRAPPED = [
    drift.Wrapped(
        "verl.workers.utils.losses:ppo_loss",
        signature="config, model_output, data, dp_group=None",
        returns="(scalar loss, dict of metrics)",
        sources={"0.9.1": "d7c0f8772b444f55a59975a1fae154c43a2dab4724a88c89d95237e0a128c561"},
    ),
    drift.Wrapped(
        "verl.trainer.ppo.core_algos:kl_penalty",
        signature="logprob, ref_logprob, kl_penalty",
        returns="[B, T] per-token KL",
        sources={"0.9.1": "a2d1ace64346e3362dfc9b123634ee0378c39a3bdc58f44451422cb4b8ae6f47"},
        probe=_kl_penalty_probe,
    ),
    drift.Wrapped(
        "verl.utils.config:validate_config",
        signature="config, use_reference_policy, use_critic",
        returns="None",
        sources={"0.9.1": "ab4096deecfec7451da5f1df261e0d74c79422acaec645c0cc4ce9e023085630"},
    ),
    drift.Wrapped(
        "verl.utils.tracking:Tracking.log",
        signature="self, data, step, backend=None",
        returns="None",
        sources={"0.9.1": "2158e536f1851c6f66ba0b2fff629f91dc76c1cb7b59397f7aa4acaf4c56f93a"},
    ),
]


@dataclass
class _MicroBatch:
    """The columns of the micro-batch in flight, ``[B, T]`` each, and the metrics its KL term produced."""

    config: KLConfig
    mask: Tensor
    old_logp: Tensor
    ref_logp: Tensor | None
    rollout_weights: Tensor | None
    metrics: dict[str, float] | None = None

    def matrix(self, logp: Tensor) -> Tensor:
        terms = head_terms(
            logp,
            self.ref_logp,
            mask=self.mask,
            config=self.config,
            old_logp=self.old_logp,
            rollout_weights=self.rollout_weights,
        )
        self.metrics = measure(terms)
        # Combined: the pull is in the advantages already; the matrix only reports.
        return terms.value if self.config.form == "combined" else terms.matrix(logp)


_IN_FLIGHT: ContextVar[_MicroBatch | None] = ContextVar("kl_plugins_micro_batch", default=None)


def _kl_config(actor_config) -> KLConfig | None:
    return getattr(actor_config.policy_loss, "kl", None)


def _columns(data, config: KLConfig) -> _MicroBatch:
    names = ["response_mask", "old_log_probs", "ref_log_prob", "rollout_is_weights"]
    padded = data.select(*[n for n in names if n in data]).to_padded_tensor()
    return _MicroBatch(
        config,
        mask=padded["response_mask"].to(bool),
        old_logp=padded["old_log_probs"],
        ref_logp=padded.get("ref_log_prob", None),
        rollout_weights=padded.get("rollout_is_weights", None),
    )


def _wrap_ppo_loss(original):
    @functools.wraps(original)
    def ppo_loss(config, model_output, data, dp_group=None):
        kl = _kl_config(config)
        if kl is None:
            return original(config, model_output, data, dp_group)
        beta = tensordict_utils.get_non_tensor_data(data, trainer.BETA, None)
        if beta is not None:
            config = _with_beta(config, beta)
        elif config.policy_loss.scheduled:
            raise RuntimeError(
                "the batch carries no beta of kl_plugins: this trainer is not verl's PPOTrainer (v1), and would follow "
                "neither kl.controller nor kl.reference. Drop them, or use verl.trainer.main_ppo"
            )
        batch = _columns(data, kl)
        _check_actor(config, kl, batch)
        token = _IN_FLIGHT.set(batch)
        try:
            loss, metrics = original(config, model_output, data, dp_group)
        finally:
            _IN_FLIGHT.reset(token)
        if kl.placement == "reward":
            batch.matrix(no_padding_2_padding(model_output["log_probs"], data))
        if batch.metrics is None:
            raise RuntimeError(
                f"verl {verl.__version__} computed its loss without calling kl_plugins' KL head: the run would train "
                "without the configured KL. Use a supported verl, or remove the policy_loss.kl block"
            )
        for name, value in batch.metrics.items():
            metrics[f"kl/{name}"] = Metric(AggregationType.MAX if "max" in name else AggregationType.MEAN, value)
        return loss, metrics

    return ppo_loss


def _with_beta(config, beta: float):
    """The actor's configuration, frozen by verl, with the controller's ``kl_loss_coef``."""
    config = copy.copy(config)
    object.__setattr__(config, "kl_loss_coef", beta)
    return config


def _wrap_kl_penalty(original):
    @functools.wraps(original)
    def kl_penalty(logprob, ref_logprob, kl_penalty):
        batch = _IN_FLIGHT.get()
        if batch is not None:
            return batch.matrix(logprob)
        kind, _, estimator = kl_penalty.partition(":")
        if kind != KL_TYPE:
            return original(logprob, ref_logprob, kl_penalty)
        if not estimator:
            raise ValueError(
                f"kl_penalty={kl_penalty!r} outside a loss with a policy_loss.kl block: in the actor, set "
                "policy_loss._target_=kl_plugins.verl.KLPolicyLossConfig and policy_loss.kl.estimator; in the reward, "
                "write algorithm.kl_penalty=kl_plugins:k1"
            )
        return get_estimator(estimator).value(logprob, ref_logprob)

    return kl_penalty


def combined_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config=None,
    rollout_is_weights: Tensor | None = None,
):
    """Verl's own policy loss (``combined_loss_mode``) on A - beta C (7); beta is ``kl_loss_coef``."""
    batch = _IN_FLIGHT.get()
    if batch is None:
        raise RuntimeError(
            f"policy loss {COMBINED_LOSS!r} was called outside verl's ppo_loss: the reference is unknown"
        )
    advantages = combined_advantages(
        advantages, log_prob, batch.ref_logp, beta=config.kl_loss_coef, mask=response_mask, config=batch.config
    )
    return core_algos.get_policy_loss_fn(config.policy_loss.combined_loss_mode)(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=advantages,
        response_mask=response_mask,
        loss_agg_mode=loss_agg_mode,
        config=config,
        rollout_is_weights=rollout_is_weights,
    )


def clipped_group_norm(token_level_rewards: Tensor, response_mask: Tensor, config=None, index=None, **_):
    """Advantage estimator ``kl_group_norm``: GRPO with the group's std clipped (79).

    ``algorithm.kl_group_norm.std_min`` (default 0.1) and ``.std_max`` (default none) are the bounds.
    ``token_level_rewards`` and ``response_mask`` ``[B, T]``, ``index`` B group ids; returns (advantages, returns).
    """
    bounds = dict((config or {}).get("kl_group_norm", None) or {})
    if unknown := set(bounds) - {"std_min", "std_max"}:
        raise ValueError(f"algorithm.kl_group_norm has unknown keys {sorted(unknown)}; known: std_min, std_max")
    rewards = (token_level_rewards * response_mask).sum(-1)
    normed = group_norm(rewards, index, std_min=bounds.get("std_min", 0.1), std_max=bounds.get("std_max"))
    advantages = normed.unsqueeze(-1) * response_mask
    return advantages, advantages


def _check_actor(config, kl: KLConfig, batch: _MicroBatch | None = None) -> None:
    """Refuse an actor whose ``kl`` block would not act as written; in the driver and again in the worker."""
    where = "actor_rollout_ref.actor"
    if kl.placement == "reward":
        if config.use_kl_loss:
            raise ValueError(
                f"kl.placement=reward with {where}.use_kl_loss=True would count the KL twice; set use_kl_loss=False"
            )
    elif not config.use_kl_loss:
        raise ValueError(
            f"kl.placement=loss needs {where}.use_kl_loss=True: without it verl computes no KL and runs no reference"
        )
    elif config.kl_loss_type not in (KL_TYPE, "low_var_kl"):  # low_var_kl is verl's default: not a wish
        raise ValueError(
            f"{where}.kl_loss_type={config.kl_loss_type!r} and policy_loss.kl.estimator={kl.estimator!r} are two KL "
            f"losses; set kl_loss_type={KL_TYPE}, or remove the kl block"
        )
    if config.kl_loss_coef < 0:
        raise ValueError(f"{where}.kl_loss_coef={config.kl_loss_coef} < 0 would reward distance from the reference")
    if batch is not None and batch.ref_logp is None:
        raise ValueError("the batch has no ref_log_prob though the actor has a kl block: verl ran no reference policy")


def _wrap_validate_config(original):
    @functools.wraps(original)
    def validate_config(config, use_reference_policy, use_critic):
        original(config, use_reference_policy, use_critic)
        actor = verl.utils.config.omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        kl = _kl_config(actor)
        if kl is None:
            return
        in_reward = config.algorithm.get("use_kl_in_reward", False)
        if kl.placement == "loss" and in_reward:
            raise ValueError(
                "the KL is in the loss (kl.placement=loss) and in the reward (algorithm.use_kl_in_reward=True): it "
                "would count twice. Set algorithm.use_kl_in_reward=False, or kl.placement=reward with use_kl_loss=False"
            )
        _check_actor(actor, kl)
        if kl.placement == "reward":
            names = [f"{KL_TYPE}:{kl.estimator}", kl.estimator, *(["kl"] if kl.estimator == "k1" else [])]
            if not in_reward:
                raise ValueError("kl.placement=reward needs algorithm.use_kl_in_reward=True, or no KL acts at all")
            if config.algorithm.kl_penalty not in names:
                raise ValueError(
                    f"algorithm.kl_penalty={config.algorithm.kl_penalty!r} and kl.estimator={kl.estimator!r} differ; "
                    f"set algorithm.kl_penalty={names[0]}"
                )
        trainer.check(config)
        block = OmegaConf.to_container(config.actor_rollout_ref.actor.policy_loss.kl, resolve=True)
        print(f"[kl_plugins] {describe(*read_block(block))}", flush=True)

    return validate_config


def _wrap_tracking_log(original):
    @functools.wraps(original)
    def log(self, data, step, backend=None):
        renamed = {k.removeprefix("actor/") if k.startswith("actor/kl/") else k: v for k, v in data.items()}
        return original(self, renamed, step, backend)

    return log


def _wrap_update_actor(original):
    @functools.wraps(original)
    def update_actor(self, data):
        output = original(self, data)
        # Ranks without outputs (inner pipeline stages) return nothing to look at.
        if output is not None and "kl" in self.config.actor.policy_loss and "kl/k1" not in output["metrics"]:
            raise RuntimeError(
                f"the first update of verl {verl.__version__} did not go through kl_plugins' ppo_loss: the run would "
                "train without the configured KL. Use a supported verl, or remove the policy_loss.kl block"
            )
        return output

    return update_actor


def installed() -> bool:
    """Whether this process's verl calls the plugin."""
    return hasattr(losses.ppo_loss, "__kl_plugins__")


def install() -> None:
    """Check every wrapped function, then put all wrappers in place; again is harmless.

    Raises:
        kl_plugins.drift.DriftError: verl is not the version, signature or body this was written against.
        ValueError: another plugin took one of our registered names.
    """
    if installed():
        return
    drift.check("verl", verl.__version__, WRAPPED)
    for registry, name in (
        (core_algos.POLICY_LOSS_REGISTRY, COMBINED_LOSS),
        (core_algos.ADV_ESTIMATOR_REGISTRY, GROUP_NORM),
    ):
        if name in registry and registry[name].__module__ != __name__:
            raise ValueError(
                f"verl's registry already has {name!r}, from {registry[name].__module__}; uninstall one plugin"
            )
    # Nothing below can fail, so a load that fails leaves verl as it was.
    core_algos.POLICY_LOSS_REGISTRY[COMBINED_LOSS] = combined_policy_loss
    core_algos.ADV_ESTIMATOR_REGISTRY[GROUP_NORM] = clipped_group_norm
    _rebind(losses.ppo_loss, _wrap_ppo_loss)
    _rebind(core_algos.kl_penalty, _wrap_kl_penalty)
    _rebind(verl.utils.config.validate_config, _wrap_validate_config)
    verl.utils.tracking.Tracking.log = _marked(_wrap_tracking_log(verl.utils.tracking.Tracking.log))
    after_import("verl.trainer.ppo.v1.trainer_base", trainer.into_trainer)


def guard_worker() -> None:
    """In a process that holds verl's workers: check after each actor update that the loss went through the plugin."""
    workers = sys.modules.get("verl.workers.engine_workers")
    if workers is None:
        return
    worker = workers.ActorRolloutRefWorker
    if workers.ppo_loss is not losses.ppo_loss or not installed():
        raise RuntimeError(
            "verl's worker holds a ppo_loss that is not kl_plugins'; load kl_plugins.verl before verl's workers"
        )
    if not hasattr(worker.update_actor, "__kl_plugins__"):
        worker.update_actor = _marked(_wrap_update_actor(worker.update_actor))


def _rebind(original, wrap) -> None:
    """Replace a function under its name in every verl module that holds it (verl imports by name)."""
    wrapped = _marked(wrap(original))
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "verl"]:
        for attribute, value in list(vars(module).items()):
            if value is original:
                setattr(module, attribute, wrapped)


def _marked(function):
    function.__kl_plugins__ = True
    return function
