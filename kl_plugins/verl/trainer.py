"""What changes over a run of verl: beta, the reference, and both in its checkpoints.

A replaced reference is written once, at its reset, beside the checkpoints, which name it by the number of resets.
`PPOTrainer`, verl's single controller, is wrapped where it starts, updates the actor, saves and loads. What has to be
done to weights runs on every rank, sharded, in the processes that hold them (Ray's ``__ray_call__``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import verl
from omegaconf import OmegaConf
from torch import Tensor

from kl_plugins import drift
from kl_plugins.schedule import Run, forget_moments, read_block

BETA = "kl_plugins_beta"  # of the update in flight, beside the batch's columns
STATE = "kl_plugins.json"
REFERENCE = "kl_plugins_reference"
STRATEGIES = ("fsdp2", "megatron")  # whose shards can be copied from one model to the other

_TRAINER = "verl.trainer.ppo.v1.trainer_base:PPOTrainer"
WRAPPED = [
    drift.Wrapped(
        f"{_TRAINER}.__init__",
        signature="self, config",
        returns="None",
        sources={"0.9.1": "6f938d77859b66aeeceb03a39bc9a7b5e7b6f50004aa8b1e2508f6e289fa1b93"},
    ),
    drift.Wrapped(
        f"{_TRAINER}._update_actor",
        signature="self, batch, metrics",
        returns="the batch; metrics get the actor's, actor/kl/sampled among them",
        sources={"0.9.1": "d7009bd8a69d40b9e96c13bda5226cc0ab2c18db706606ea88e787b0ccdc3d83"},
    ),
    drift.Wrapped(
        f"{_TRAINER}._save_checkpoint",
        signature="self",
        returns="None",
        sources={"0.9.1": "8c2435b577e54f19ab6012e1eb5f44f01e6c8f4dd6380467914cb6afb9ab9d23"},
    ),
    drift.Wrapped(
        f"{_TRAINER}._load_checkpoint",
        signature="self",
        returns="None; global_steps is the checkpoint's, or 0",
        sources={"0.9.1": "bb446d77c48ac6cc633e86c83b7195b78d899ece10d1b5e7150908acddb17265"},
    ),
]


def start(config: Any) -> Run:
    """The run of a configuration that has a ``kl`` block."""
    actor = config.actor_rollout_ref.actor
    kl, schedule = read_block(OmegaConf.to_container(actor.policy_loss.kl, resolve=True))
    return Run(schedule, config.algorithm.kl_ctrl.kl_coef if kl.placement == "reward" else actor.kl_loss_coef)


def check(config: Any) -> None:
    """Refuse, in the driver, a schedule that this configuration of verl could not follow.

    Raises:
        ValueError: with the key and the way out.
    """
    schedule = start(config).schedule
    if schedule.constant:
        return
    if not config.trainer.use_v1:
        raise ValueError("kl.controller and kl.reference act in verl's trainer v1: set trainer.use_v1=True")
    adaptive = config.algorithm.use_kl_in_reward and config.algorithm.kl_ctrl.type != "fixed"
    if adaptive and schedule.controller.kind != "fixed":
        raise ValueError(
            f"algorithm.kl_ctrl.type={config.algorithm.kl_ctrl.type} and kl.controller.kind="
            f"{schedule.controller.kind} are two controllers of one beta: set algorithm.kl_ctrl.type=fixed"
        )
    if not schedule.reference.resets:
        return
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    lora = model.get("lora_rank", 0) or model.get("lora", {}).get("rank", 0) or model.get("lora_adapter_path")
    if lora:
        raise ValueError(
            "kl.reference resets copy the policy's weights into the reference, and with LoRA the reference is the "
            "policy's own base model: drop kl.reference, or LoRA"
        )
    if config.trainer.v1.trainer_mode == "separate_async":
        raise ValueError(
            "kl.reference resets need policy and reference in one process, and trainer.v1.trainer_mode=separate_async "
            "keeps the reference elsewhere: choose sync or colocate_async"
        )
    for key, strategy in (("actor", actor.strategy), ("ref", config.actor_rollout_ref.ref.strategy)):
        if strategy not in STRATEGIES or strategy != actor.strategy:
            raise ValueError(
                f"kl.reference resets copy shard by shard, which they can where actor and reference have one strategy "
                f"of {', '.join(STRATEGIES)}; actor_rollout_ref.{key}.strategy={strategy}"
            )
    if schedule.reference.reset_optimizer and actor.strategy != "fsdp2":
        raise ValueError(
            f"kl.reference.reset_optimizer=true is for actor.strategy=fsdp2; {actor.strategy} keeps the moments in "
            "buffers of its own"
        )


def into_trainer(module: Any) -> None:
    """Wrap ``PPOTrainer`` of ``verl.trainer.ppo.v1.trainer_base``, right after its import."""
    drift.check("verl", verl.__version__, WRAPPED)
    trainer = module.PPOTrainer
    for name, wrap in (
        ("__init__", _wrap_init),
        ("_update_actor", _wrap_update_actor),
        ("_save_checkpoint", _wrap_save_checkpoint),
        ("_load_checkpoint", _wrap_load_checkpoint),
    ):
        setattr(trainer, name, wrap(getattr(trainer, name)))


def _wrap_init(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def __init__(self, config):
        stock(self, config)
        self.kl_run = start(config) if "kl" in config.actor_rollout_ref.actor.policy_loss else None
        if self.kl_run and self.kl_run.schedule.controller.kind != "fixed" and config.algorithm.use_kl_in_reward:
            self.kl_ctrl_in_reward = self.kl_run

    return __init__


def _wrap_update_actor(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def _update_actor(self, batch, metrics):
        run = self.kl_run
        if run is None:
            return stock(self, batch, metrics)
        if not run.schedule.constant:
            batch.extra_info[BETA] = run.value
        batch = stock(self, batch, metrics)
        metrics.update(run.metrics())
        kl = float(metrics["actor/kl/sampled"])
        if warning := run.warning(kl):
            print(f"[kl_plugins] WARNING, step {self.global_steps}: {warning}", flush=True)
        if run.step(kl, len(batch)):
            _on_every_rank(self, replace_reference, run.schedule.reference.reset_optimizer)
            if self.config.trainer.save_freq > 0:
                folder = Path(self.config.trainer.default_local_dir).absolute()
                _on_every_rank(self, save_reference, str(folder / REFERENCE / f"reset_{run.state.resets}"))
            print(
                f"[kl_plugins] step {self.global_steps}: the reference is now the policy, reset {run.state.resets}, "
                f"at a KL of {kl:.4g} nats a token",
                flush=True,
            )
        return batch

    return _update_actor


def _wrap_save_checkpoint(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def _save_checkpoint(self):
        if self.kl_run is not None:
            # Before verl's own, whose last act is to name this checkpoint the latest.
            folder = Path(self.config.trainer.default_local_dir).absolute() / f"global_step_{self.global_steps}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / STATE).write_text(json.dumps(self.kl_run.state.to_mapping()))
        stock(self)

    return _save_checkpoint


def _wrap_load_checkpoint(stock: Callable) -> Callable:
    @functools.wraps(stock)
    def _load_checkpoint(self):
        stock(self)
        run = self.kl_run
        if run is None or self.global_steps == 0:
            return
        trainer = self.config.trainer
        latest = Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder = Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else latest
        file = folder.absolute() / STATE
        if not file.exists():
            if run.schedule.constant:
                return
            raise FileNotFoundError(
                f"{file}: this checkpoint was saved without kl_plugins, and kl.controller or kl.reference would start "
                "anew in mid-run: drop them, or resume a checkpoint of a run that had them"
            )
        run.restore(json.loads(file.read_text()))
        if run.state.resets:
            reset = folder.absolute().parent / REFERENCE / f"reset_{run.state.resets}"
            _on_every_rank(self, load_reference, str(reset))
        print(f"[kl_plugins] resumed at step {self.global_steps}: {run.state}", flush=True)

    return _load_checkpoint


def _on_every_rank(trainer: Any, function: Callable, *args: Any) -> None:
    import ray

    ray.get([worker.__ray_call__.remote(function, *args) for worker in trainer.actor_rollout_wg.workers])


def replace_reference(process: Any, reset_optimizer: bool) -> None:
    """On one rank: the reference's shards become the policy's; with ``reset_optimizer`` Adam's moments become 0."""
    policy, reference = _engines(process)
    with policy.eval_mode(), reference.eval_mode(), torch.no_grad():
        _copy(_shards(policy), _shards(reference))
    if reset_optimizer:
        forget_moments(policy.optimizer)


def save_reference(process: Any, folder: str) -> None:
    """On one rank: write the reference's shards, for a resume on as many ranks."""
    _, reference = _engines(process)
    file = _shard_file(folder)
    file.parent.mkdir(parents=True, exist_ok=True)
    with reference.eval_mode(), torch.no_grad():
        shards = {name: shard.cpu() for name, shard in _shards(reference).items()}
    torch.save(shards, file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)


def load_reference(process: Any, folder: str) -> None:
    """On one rank: the reference's shards become those that were written."""
    _, reference = _engines(process)
    file = _shard_file(folder)
    if not file.exists():
        raise FileNotFoundError(
            f"{file}: the reference had been replaced before this checkpoint, and its weights are not there: resume "
            "with as many ranks as it was saved with, on paths that every node sees"
        )
    with reference.eval_mode(), torch.no_grad():
        _copy(torch.load(file, map_location="cpu", weights_only=True), _shards(reference))


def _engines(process: Any) -> tuple[Any, Any]:
    """Policy's and reference's engine in a Ray process of verl's, which may hold other workers beside."""
    from verl.workers.engine_workers import ActorRolloutRefWorker

    (worker,) = [w for w in process.worker_dict.values() if isinstance(w, ActorRolloutRefWorker)]
    return worker.actor.engine, worker.ref.engine


def _shards(engine: Any) -> dict[str, Tensor]:
    """One rank's part of a model by name; the storage is the model's."""
    chunks = engine.module if isinstance(engine.module, (list, tuple)) else [engine.module]
    return {
        f"{i}.{name}": getattr(value, "_local_tensor", value)
        for i, chunk in enumerate(chunks)
        for name, value in chunk.state_dict().items()
        if isinstance(value, Tensor)
    }


def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    """Write one model's shards over another's.

    Raises:
        ValueError: the two are not cut alike.
    """
    differ = [
        name
        for name in source.keys() | target.keys()
        if name not in source or name not in target or source[name].shape != target[name].shape
    ]
    if differ:
        raise ValueError(
            f"policy and reference differ at {len(differ)} of {len(target)} shards ({sorted(differ)[0]}): give "
            "actor_rollout_ref.ref the actor's parallel sizes and dtype settings"
        )
    for name, shard in target.items():
        shard.copy_(source[name])


def _shard_file(folder: str) -> Path:
    distributed = torch.distributed
    return Path(folder) / f"world_size_{distributed.get_world_size()}_rank_{distributed.get_rank()}.pt"
