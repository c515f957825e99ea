"""What changes over a run of OpenRLHF: beta, the reference, both in its checkpoints; and its scalars in a file.

`BasePPOTrainer`, the controller of both its trainers, is wrapped where it starts, makes a step, saves and resumes; the
source patch puts the same around the class. Weights go from policy to reference through Ray's object store, whole, and
are cut again where the reference is sharded. A replaced reference is written once, at its reset, beside the
checkpoints, whose client state has the number of resets.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kl_plugins.drift import check
from kl_plugins.openrlhf.adapter import wrap
from kl_plugins.openrlhf.hook import METRICS
from kl_plugins.openrlhf.known import PPO_TRAINER
from kl_plugins.openrlhf.settings import Settings, version
from kl_plugins.schedule import Run, forget_moments

STATE = "kl_plugins"  # in the checkpoint's client state
REFERENCE = "_kl_plugins_reference"


def into_ppo_trainer(module: ModuleType) -> None:
    """Wrap ``BasePPOTrainer`` of ``openrlhf.trainer.ppo_trainer``, right after its import."""
    check("openrlhf", version(), PPO_TRAINER)
    with_schedule(module.BasePPOTrainer)


def with_schedule(trainer: type) -> type:
    """Put the schedule into OpenRLHF's ``BasePPOTrainer``, in place, once; returns it."""
    for name, make in (
        ("__init__", _wrap_init),
        ("train_step", _wrap_train_step),
        ("save_logs_and_checkpoints", _wrap_save),
        ("init_checkpoint_states", _wrap_init_checkpoint_states),
    ):
        wrap(trainer, name, make)
    return trainer


def _wrap_init(stock: Callable) -> Callable:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        settings = Settings.of(self.args)
        beta = self.args.algo.kl.init_coef
        self.kl_run = Run(settings.schedule, beta) if settings.kl and beta > 0 else None
        if self.kl_run and settings.schedule.controller.kind != "fixed":
            self.kl_ctl = self.experience_maker.kl_ctl = self.kl_run

    return __init__


def _wrap_train_step(stock: Callable) -> Callable:
    def train_step(self: Any, rollout_samples: Any, global_step: int) -> tuple[dict[str, Any], int]:
        run = self.kl_run
        logged = run.metrics() if run else {}
        status, global_step = stock(self, rollout_samples, global_step)
        if run is None or "policy_loss" not in status:  # while the critic alone learns, nothing moves
            return status, global_step
        status.update(logged)
        kl = float(status["kl/sampled"])
        if warning := run.warning(kl):
            print(f"kl_plugins: WARNING, step {global_step}: {warning}", flush=True)
        if run.step(kl, int(status["rollout/num_samples"])):
            replace_reference(self)
            print(
                f"kl_plugins: step {global_step}: the reference is now the policy, reset {run.state.resets}, at a KL "
                f"of {kl:.4g} nats a token",
                flush=True,
            )
        return status, global_step

    return train_step


def _wrap_save(stock: Callable) -> Callable:
    def save_logs_and_checkpoints(
        self: Any, global_step: int, logs_dict: Any = None, client_states: Any = None
    ) -> None:
        path = os.environ.get(METRICS)
        if path:
            with open(path, "a") as file:
                file.write(json.dumps(step_record(global_step, logs_dict or {})) + "\n")
        if self.kl_run is not None and client_states is not None:
            client_states[STATE] = self.kl_run.state.to_mapping()
        stock(self, global_step, logs_dict, client_states)

    return save_logs_and_checkpoints


def _wrap_init_checkpoint_states(stock: Callable) -> Callable:
    def init_checkpoint_states(self: Any) -> dict[str, Any]:
        import ray

        states = stock(self)
        run = self.kl_run
        if run is None or not states["global_step"]:
            return states
        if STATE not in states:
            if run.schedule.constant:
                return states
            raise RuntimeError(
                f"the checkpoint in {self.args.ckpt.path} was saved without kl_plugins, and kl.controller or "
                "kl.reference would start anew in mid-run: drop them, or resume a checkpoint of a run that had them"
            )
        run.restore(states[STATE])
        if run.state.resets:
            file = _reference_file(self, run.state.resets)
            ray.get(_on_every_rank(self.reference_model_group, load_reference, str(file)))
        print(f"kl_plugins: resumed at step {states['global_step']}: {run.state}", flush=True)
        return states

    return init_checkpoint_states


def step_record(step: int, logs: dict[str, Any]) -> dict[str, float]:
    """One line of metrics.jsonl: every scalar under OpenRLHF's name, and the four that both frameworks share."""
    scalars = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
    shared = {"reward": "rollout/reward_mean", "kl": "kl", "pg_loss": "policy_loss", "seconds": "timing/step_total"}
    return {"step": step, **scalars, **{ours: scalars[theirs] for ours, theirs in shared.items() if theirs in scalars}}


def replace_reference(trainer: Any) -> None:
    """Give every rank of the reference the policy's weights; the optimiser forgets if the run says so."""
    import ray

    weights, *others = _on_every_rank(trainer.actor_model_group, policy_weights)
    ray.get(others)
    saves = trainer.args.ckpt.save_steps != float("inf")
    file = str(_reference_file(trainer, trainer.kl_run.state.resets)) if saves else None
    ray.get(_on_every_rank(trainer.reference_model_group, set_reference, weights, file))
    if trainer.kl_run.schedule.reference.reset_optimizer:
        ray.get(_on_every_rank(trainer.actor_model_group, reset_optimizer))


def _on_every_rank(group: Any, function: Callable, *args: Any) -> list[Any]:
    return [actor.__ray_call__.remote(function, *args) for actor in group._actor_handlers]


def _reference_file(trainer: Any, resets: int) -> Path:
    return Path(trainer.args.ckpt.path).absolute() / REFERENCE / f"reset_{resets}.pt"


def policy_weights(process: Any) -> dict[str, torch.Tensor] | None:
    """In each of the policy's processes: all weights by name, whole, on the CPU; None but for the first."""
    weights = {}
    for name, parameter in process.actor.model.module.named_parameters():
        with _gathered(process, parameter):
            if torch.distributed.get_rank() == 0:
                weights[name] = parameter.data.detach().to("cpu", copy=True)
    return weights or None


def set_reference(process: Any, weights: dict[str, torch.Tensor], file: str | None) -> None:
    """In each of the reference's processes: take these weights, and write them to ``file`` if there is one."""
    parameters = dict(process.model.model.module.named_parameters())
    if parameters.keys() != weights.keys():
        differ = sorted(parameters.keys() ^ weights.keys())
        raise ValueError(
            f"policy and reference have different parameters ({len(differ)}, the first {differ[0]}): "
            "ref.model_name_or_path has to be the actor's architecture"
        )
    first = torch.distributed.get_rank() == 0
    with torch.no_grad():
        for name, parameter in parameters.items():
            with _gathered(process, parameter, modifier_rank=0):
                if first or not _sharded(process):
                    parameter.data.copy_(weights[name])
    if file and first:
        part = Path(file).with_suffix(".part")
        part.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(weights), part)
        part.rename(file)


def load_reference(process: Any, file: str) -> None:
    """In each of the reference's processes: take the weights that were written at a reset."""
    if not Path(file).exists():
        raise FileNotFoundError(
            f"{file}: the reference had been replaced before this checkpoint, and its weights are not there: resume "
            "with the ckpt.path it was saved under, on a path that every node sees"
        )
    set_reference(process, torch.load(file, map_location="cpu", weights_only=True), None)


def reset_optimizer(process: Any) -> None:
    """In each of the policy's processes: DeepSpeed's optimiser forgets its moments."""
    optimizer = process.actor.model.optimizer
    forget_moments(getattr(optimizer, "optimizer", optimizer))


def _gathered(process: Any, parameter: torch.Tensor, modifier_rank: int | None = None) -> Any:
    """Whole within the block where ZeRO-3 keeps a part of it; what ``modifier_rank`` then writes, all ranks get."""
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter], modifier_rank=modifier_rank, enabled=_sharded(process))


def _sharded(process: Any) -> bool:
    return process.strategy.args.ds.zero_stage == 3
