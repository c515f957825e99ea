"""A real training step with the plugin beside the framework alone: forward, loss, backward, clipping, optimiser.

verl's own FSDP engine under its own ``ppo_loss``, and OpenRLHF's own ``ActorPPOTrainer.training_step`` under DeepSpeed,
one process each, on the CPU demo's model. Native: the framework's k3 as loss. Ours: k2 with clip, metrics included.
Both share engine, model and batch, and take turns. No generation: that would only make the difference smaller.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import Result, in_turn, release
from kl_plugins.cpu import OPENRLHF_ENV, VERL_ENV, addition

RESPONSES, MICRO, PROMPT, BETA = 64, 32, 8, 0.01
LENGTHS = (6, 56)  # tokens a response: the demo's, and all that its model has positions for
KL = {"estimator": "k2", "correction": "clip"}


def run(repeats: int) -> list[Result]:
    threads, results = torch.get_num_threads(), []
    with tempfile.TemporaryDirectory() as directory:
        for package, prepare in {"verl": _verl, "openrlhf": _openrlhf}.items():
            if importlib.util.find_spec(package):
                steps = prepare(directory)
                torch.set_num_threads(threads)
                for length in LENGTHS:
                    variants = {name: step(batch(length)) for name, step in steps.items()}
                    title = f"step, {release(package)}, {RESPONSES} responses of up to {length} tokens"
                    results += in_turn(title, variants, 10 * repeats)
    return results or [Result("step", "neither verl nor openrlhf is installed", 0, 0, 0)]


def batch(length: int) -> dict[str, Tensor]:
    """Random questions and answers, ``[RESPONSES, PROMPT + length]``; the answers end where they end."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 259, (RESPONSES, PROMPT + length), generator=draw)
    ends = torch.randint(length // 2, length + 1, (RESPONSES, 1), generator=draw)
    answered = torch.arange(length) < ends
    logp, advantages = -5.5 * torch.ones(RESPONSES, length), torch.randn(RESPONSES, 1, generator=draw)
    return {
        "tokens": tokens,
        "attention": torch.cat([torch.ones(RESPONSES, PROMPT, dtype=torch.bool), answered], 1).long(),
        "mask": answered.long(),
        "old_logp": logp * answered,
        "ref_logp": (logp + 0.1 * torch.randn(logp.shape, generator=draw)) * answered,
        "advantages": advantages * answered,
    }


def _rendezvous(environment: dict[str, str]) -> None:
    """What a Ray worker of one rank would find."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(environment, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")


def _verl(directory: str) -> dict[str, Callable]:
    _rendezvous(VERL_ENV)
    import kl_plugins.cpu.verl  # noqa: I001  the platform, before verl's losses
    import kl_plugins.verl  # noqa: F401

    from tensordict import TensorDict
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, HFModelConfig
    from verl.workers.config.optimizer import FSDPOptimizerConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding

    from kl_plugins.verl import KLPolicyLossConfig

    model = str(addition.prepare(directory) / "model")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    precision = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    optimiser = FSDPOptimizerConfig(lr=1e-6)
    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=model, use_remove_padding=False, override_config={"attn_implementation": "sdpa"}
        ),
        engine_config=FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=precision),
        optimizer_config=optimiser,
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()

    def actor(**axes: Any) -> FSDPActorConfig:
        common = dict(strategy="fsdp2", rollout_n=8, ppo_micro_batch_size_per_gpu=MICRO, optim=optimiser)
        return FSDPActorConfig(**common, use_kl_loss=True, kl_loss_coef=BETA, **axes)

    def step_of(config: FSDPActorConfig) -> Callable:
        def prepare(columns: dict[str, Tensor]) -> Callable[[], None]:
            data = TensorDict(
                {
                    "input_ids": columns["tokens"],
                    "attention_mask": columns["attention"],
                    "position_ids": torch.arange(columns["tokens"].shape[1]).expand_as(columns["tokens"]).clone(),
                    "prompts": columns["tokens"][:, :PROMPT],
                    "responses": columns["tokens"][:, PROMPT:],
                    "response_mask": columns["mask"],
                    "old_log_probs": columns["old_logp"],
                    "ref_log_prob": columns["ref_logp"],
                    "advantages": columns["advantages"],
                },
                batch_size=[RESPONSES],
            )
            data = left_right_2_no_padding(data)
            tu.assign_non_tensor(data, use_remove_padding=False, use_dynamic_bsz=False, use_fused_kernels=False)
            tu.assign_non_tensor(data, micro_batch_size_per_gpu=MICRO, temperature=1.0, global_batch_size=RESPONSES)

            def step() -> None:
                with engine.train_mode():
                    engine.train_batch(data, loss_function=partial(ppo_loss, config=config))

            return step

        return prepare

    ours = actor(policy_loss=KLPolicyLossConfig(kl=KL), kl_loss_type="kl_plugins")
    return {"verl's k3": step_of(actor(kl_loss_type="low_var_kl")), "kl_plugins, k2 and clip": step_of(ours)}


def _openrlhf(directory: str) -> dict[str, Callable]:
    _rendezvous(OPENRLHF_ENV)
    from kl_plugins.cpu import openrlhf as cpu

    cpu.install()  # before DeepSpeed is imported, which transformers does
    from openrlhf.models import Actor
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ray import ppo_actor
    from openrlhf.utils import get_strategy
    from openrlhf.utils.config import hierarchize

    from kl_plugins.openrlhf import adapter, flags
    from kl_plugins.openrlhf.command import openrlhf_parser

    adapter.into_ppo_actor(ppo_actor)
    model = str(addition.prepare(directory) / "model")

    def step_of(*extra: str) -> Callable:
        words = ["--actor.model_name_or_path", model, "--ds.attn_implementation", "sdpa", "--algo.kl.use_loss"]
        words += ["--train.batch_size", str(RESPONSES), "--train.micro_batch_size", str(MICRO)]
        words += [
            "--algo.kl.init_coef",
            str(BETA),
            "--algo.advantage.estimator",
            "group_norm",
            "--actor.adam.lr",
            "1e-6",
        ]
        words += ["--rollout.n_samples_per_prompt", "8", *extra]
        args = hierarchize(flags.parse(openrlhf_parser(), words))
        args.actor.eps_clip_low_high = args.actor.eps_clip_low_high or (args.actor.eps_clip, args.actor.eps_clip)
        strategy = get_strategy(args)
        strategy.setup_distributed()
        actor = Actor(model, attn_implementation="sdpa", ds_config=strategy.get_ds_train_config())
        optimiser = dict(optim="adam", muon=vars(args.actor.muon), adam=vars(args.actor.adam), max_norm=1.0)
        schedule = dict(lr_scheduler="constant", lr_warmup_ratio=0.0, min_lr_ratio=0.1, scheduler_steps=10**9)
        actor, optim, scheduler = strategy.prepare((actor, {**optimiser, **schedule}))
        trainer = ppo_actor.ActorPPOTrainer(
            strategy,
            actor,
            ema_model=None,
            actor_optim=optim,
            actor_scheduler=scheduler,
            micro_train_batch_size=MICRO,
            dataloader_pin_memory=False,
        )

        def prepare(columns: dict[str, Tensor]) -> Callable[[], None]:
            pad = (PROMPT - 1, 0)  # OpenRLHF's columns are over the whole sequence but its first token
            whole = {
                "sequences": columns["tokens"],
                "attention_mask": columns["attention"],
                **{
                    theirs: torch.nn.functional.pad(columns[name], pad)
                    for theirs, name in {
                        "action_mask": "mask",
                        "action_log_probs": "old_logp",
                        "base_action_log_probs": "ref_logp",
                        "advantages": "advantages",
                    }.items()
                },
            }

            def micro(rows: slice) -> Experience:
                part = {name: x[rows] for name, x in whole.items()}
                return Experience(
                    **part,
                    response_length=part["action_mask"].sum(-1),
                    total_length=part["attention_mask"].sum(-1),
                    index=list(range(MICRO)),
                    info={"reward": torch.zeros(MICRO)},
                )

            experiences = [micro(slice(start, start + MICRO)) for start in range(0, RESPONSES, MICRO)]

            def step() -> None:
                for number, experience in enumerate(experiences):
                    trainer.training_step(experience, BETA, number)

            return step

        return prepare

    native = step_of("--algo.kl.estimator", "k3")
    return {"OpenRLHF's k3": native, "kl_plugins, k2 and clip": step_of(*_flags(KL))}


def _flags(axes: dict[str, str]) -> list[str]:
    return [word for axis, value in axes.items() for word in (f"--kl_{axis}", value)]
