"""The preflight of verl 0.9.1's resolved configuration: its batch arithmetic, its KL, what it asks of a cluster.

The rules are verl's own, from its validate_config, its workers' mini-batches (engine_workers.train_mini_batch), its
engines' micro-batches (workers/engine/utils.py) and its v1 trainer's padding; each would stop a run minutes later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from kl_plugins.doctor.checks import Finding, ok
from kl_plugins.launch.needs import Needs, Pool, at, divides, is_path, multiple, sampling

VERSIONS = ("0.9.1",)
# What verl.trainer.constants_ppo gives to ray.init even if the job has it; its other variables yield to the job's.
ALWAYS = ("VERL_FULL_DETERMINISM", "VLLM_BATCH_INVARIANT", "VERL_RL_INSIGHT_ENABLE")
FORWARDED = (
    "PYTHONHASHSEED",
    "CUBLAS_WORKSPACE_CONFIG",
    "FLASH_ATTENTION_DETERMINISTIC",
    "NCCL_DETERMINISTIC",
    "NCCL_ALGO",
)
PROFILED = "NVTX_INJECTION64_PATH"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def needs(config: Mapping[str, Any]) -> Needs:
    """What a run of this configuration asks of the cluster."""
    pools = [Pool("trainer", at(config, "trainer.nnodes"), at(config, "trainer.n_gpus_per_node"), 3)]
    if at(config, "trainer.v1.trainer_mode") == "separate_async":
        pools.append(
            Pool("rollout", at(config, f"{ROLLOUT}.nnodes", 0), at(config, f"{ROLLOUT}.n_gpus_per_node", 0), 3)
        )
    if at(config, "reward.reward_model.enable_resource_pool"):
        rewards = "reward.reward_model"
        pools.append(Pool("reward", at(config, f"{rewards}.nnodes"), at(config, f"{rewards}.n_gpus_per_node"), 3))
    keys = ["actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path", "data.custom_cls.path"]
    keys += ["reward.custom_reward_function.path", "trainer.v1.sampler.custom_sampler.path"]
    if _critic(config):
        keys.append("critic.model.path")
    if at(config, "reward.reward_model.enable"):
        keys.append("reward.reward_model.model_path")
    if at(config, "trainer.resume_mode") == "resume_path":
        keys.append("trainer.resume_from_path")
    named = {key: at(config, key) for key in keys}
    paths = {key: value for key, value in named.items() if value and is_path(value)}
    for key in ("data.train_files", "data.val_files"):
        files = at(config, key, [])
        for i, file in enumerate([files] if isinstance(files, str) else files):
            if "://" not in file:
                paths[f"{key}[{i}]" if i else key] = file
    modules = [value.removeprefix("pkg://") for value in named.values() if value and value.startswith("pkg://")]
    every = at(config, "trainer.save_freq", -1)
    kept = at(config, "trainer.max_actor_ckpt_to_keep") or max(
        1, (at(config, "trainer.total_training_steps") or 0) // max(1, every)
    )
    contents = at(config, f"{ACTOR}.checkpoint.save_contents", [])
    # FSDP keeps parameters and Adam's two moments in fp32; the hub's form is bf16.
    saved = sum(size for name, size in (("model", 4), ("optimizer", 8), ("hf_model", 2)) if name in contents)
    return Needs(
        pools=tuple(pools),
        paths=paths,
        modules=tuple(modules),
        model=at(config, "actor_rollout_ref.model.path"),
        saved=saved * (2 if _critic(config) else 1),
        copies=kept if every > 0 else 0,
        passed=_passed(config),
        waits=False,
    )


def _passed(config: Mapping[str, Any]) -> dict[str, Any]:
    own = dict(at(config, "ray_kwargs.ray_init.runtime_env", {}))
    variables = dict.fromkeys(ALWAYS + FORWARDED) | dict(own.get("env_vars") or {})
    if at(config, "transfer_queue.enable"):
        variables["TRANSFER_QUEUE_ENABLE"] = None
    if at(config, "global_profiler.tool") == "torch":
        variables[PROFILED] = None
    return {**own, "env_vars": variables}


def findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Everything that can be said without a cluster."""
    yield from _arithmetic(config)
    yield from _kl(config)
    yield from sampling(*(at(config, f"{ROLLOUT}.{key}") for key in ("temperature", "top_p", "top_k")), ROLLOUT)
    trusting = ["actor_rollout_ref.model.trust_remote_code", "data.trust_remote_code"]
    trusting += ["critic.model.trust_remote_code"] if _critic(config) else []
    on = [key for key in trusting if at(config, key)]
    if on:
        yield Finding(
            "warn",
            f"{', '.join(on)}: Python code that comes with the model is run on every node",
            "set it to false, unless you have read that code",
        )
    else:
        yield ok("remote code of models is not trusted")


def _critic(config: Mapping[str, Any]) -> bool:
    enabled = at(config, "critic.enable")
    return at(config, "algorithm.adv_estimator") == "gae" if enabled is None else bool(enabled)


def _ranks(config: Mapping[str, Any], role: str, engine: str) -> tuple[int, int] | None:
    """Data-parallel ranks of a role and GPUs of each, or None for an engine that is not known here."""
    gpus = _gpus(config)
    strategy = at(config, f"{role}.strategy")
    if strategy == "megatron":
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        each = math.prod(at(config, f"{role}.megatron.{size}", 1) for size in sizes)
    elif strategy in ("fsdp", "fsdp2"):
        size = "ulysses_sequence_parallel_size"
        each = max(at(config, f"{role}.{size}", 1), at(config, f"{role}.{engine}.{size}", 1))
    else:
        return None
    return gpus // each, each


def _arithmetic(config: Mapping[str, Any]) -> Iterator[Finding]:
    roles = {"actor": (ACTOR, "fsdp_config")} | ({"critic": ("critic", "fsdp")} if _critic(config) else {})
    ranks = {name: _ranks(config, *role) for name, role in roles.items()}
    wrong = list(_geometry(config, roles, ranks))
    if not any(finding.level == "fail" for finding in wrong) and ranks["actor"]:
        for name, (role, _) in roles.items():
            wrong += _updates(config, role, ranks[name][0]) if ranks[name] else []
        wrong += _step(config, ranks["actor"][0], [role for role, _ in roles.values()])
    if wrong:
        yield from wrong
        return
    prompts, n, mini = _prompts(config), at(config, f"{ROLLOUT}.n"), _mini(config, ACTOR)
    yield ok(
        f"batches: {prompts} prompts x {n} = {prompts * n} responses a step, {prompts * n // mini} updates of {mini}, "
        f"{mini // ranks['actor'][0]} on each of {ranks['actor'][0]} ranks"
    )


def _gpus(config: Mapping[str, Any]) -> int:
    return at(config, "trainer.nnodes") * at(config, "trainer.n_gpus_per_node")


def _prompts(config: Mapping[str, Any]) -> int:
    return at(config, "data.train_batch_size")


def _mini(config: Mapping[str, Any], role: str) -> int:
    """Responses of one update; the key counts prompts."""
    return at(config, f"{role}.ppo_mini_batch_size") * at(config, f"{ROLLOUT}.n")


def _geometry(config: Mapping[str, Any], roles: Mapping[str, Any], ranks: Mapping[str, Any]) -> Iterator[Finding]:
    """GPUs of one copy of each model, of all GPUs."""
    gpus = _gpus(config)
    sizes = [at(config, f"{ROLLOUT}.{k}_parallel_size", 1) for k in ("tensor_model", "data", "pipeline_model")]
    yield from divides(
        math.prod(sizes),
        gpus,
        f"GPUs of a rollout replica ({ROLLOUT}: tensor x data x pipeline = {'x'.join(map(str, sizes))}) and all GPUs",
        f"change {ROLLOUT}.tensor_model_parallel_size, or trainer.nnodes x trainer.n_gpus_per_node",
    )
    if at(config, "trainer.v1.trainer_mode") == "separate_async":
        each = at(config, "trainer.v1.separate_async.parameter_sync_step") * at(config, f"{ACTOR}.ppo_mini_batch_size")
        if each != _prompts(config):
            yield Finding(
                "fail",
                f"separate_async: parameter_sync_step x ppo_mini_batch_size is {each}, train_batch_size "
                f"{_prompts(config)}",
                "make them equal",
            )
    for name, (role, _) in roles.items():
        if ranks[name] is None:
            yield Finding(
                "warn",
                f"{role}.strategy={at(config, f'{role}.strategy')}: its batch arithmetic is not known here",
                "see that ranks and micro-batches divide the mini-batch",
            )
        else:
            what, remedy = f"{name}: GPUs of one model copy and all GPUs", f"change the parallel sizes of {role}"
            yield from divides(ranks[name][1], gpus, what, remedy)


def _updates(config: Mapping[str, Any], role: str, ranks: int) -> Iterator[Finding]:
    """One role's mini-batch over its ranks, and a rank's part over micro-batches."""
    mini, what = _mini(config, role), f"{role}.ppo_mini_batch_size x {ROLLOUT}.n"
    dynamic, key = at(config, f"{role}.use_dynamic_bsz"), f"{role}.ppo_micro_batch_size_per_gpu"
    asked = at(config, f"{role}.ppo_mini_batch_size")
    if not dynamic and _prompts(config) < asked:
        yield Finding(
            "fail",
            f"data.train_batch_size={_prompts(config)} is less than {role}.ppo_mini_batch_size={asked}",
            "lower the mini-batch",
        )
    if mini % ranks:
        yield from divides(ranks, mini, f"ranks and {what}", f"change {role}.ppo_mini_batch_size")
    elif not dynamic and (micro := at(config, key)) is None:
        yield Finding("fail", f"{key} is not set", f"set it, or {role}.use_dynamic_bsz=true")
    elif not dynamic:
        yield from divides(micro, mini // ranks, f"{key} and a rank's part of {what}", f"change {key}")


def _step(config: Mapping[str, Any], ranks: int, roles: list[str]) -> Iterator[Finding]:
    """A step's responses over ranks and updates, and a rank's part over the micro-batches that only read."""
    responses, gpus = _prompts(config) * at(config, f"{ROLLOUT}.n"), _gpus(config)
    padded = multiple(responses, ranks, *(_mini(config, role) for role in roles))
    strict = not at(config, f"{ACTOR}.use_dynamic_bsz") and at(config, f"{ACTOR}.strategy") != "megatron"
    if strict and responses % gpus:
        yield from divides(gpus, responses, f"all GPUs and data.train_batch_size x {ROLLOUT}.n", "change either")
    elif padded != responses:
        yield Finding(
            "warn",
            f"{responses} responses a step are no multiple of ranks and mini-batches: verl pads them to {padded}",
            "change data.train_batch_size or the mini-batch",
        )
    reads = {"old log-probs": ROLLOUT} | ({"reference": "actor_rollout_ref.ref"} if _reference(config) else {})
    for name, role in reads.items():
        key = f"{role}.log_prob_micro_batch_size_per_gpu"
        if at(config, f"{role}.log_prob_use_dynamic_bsz"):
            continue
        if (micro := at(config, key)) is None:
            yield Finding("fail", f"{key} is not set", f"set it, or {role}.log_prob_use_dynamic_bsz=true")
        else:
            what = f"{key} and a rank's part of a step ({name})"
            yield from divides(micro, padded // ranks, what, f"change {key}")


def _reference(config: Mapping[str, Any]) -> bool:
    return bool(at(config, "algorithm.use_kl_in_reward") or at(config, f"{ACTOR}.use_kl_loss"))


def _kl(config: Mapping[str, Any]) -> Iterator[Finding]:
    placement = at(config, f"{ACTOR}.policy_loss.kl.placement", "loss")
    estimator = at(config, f"{ACTOR}.policy_loss.kl.estimator")
    in_loss, in_reward = at(config, f"{ACTOR}.use_kl_loss", False), at(config, "algorithm.use_kl_in_reward", False)
    key = f"{ACTOR}.kl_loss_coef" if placement == "loss" else "algorithm.kl_ctrl.kl_coef"
    beta = at(config, key)
    asked = f"{ACTOR}.use_kl_loss" if placement == "loss" else "algorithm.use_kl_in_reward"
    if in_loss and in_reward:
        yield Finding(
            "fail",
            f"the KL is in the loss ({ACTOR}.use_kl_loss) and in the reward (algorithm.use_kl_in_reward)",
            "it would count twice: set the one to false that kl.placement does not name",
        )
    if (placement == "loss" and not in_loss) or (placement == "reward" and not in_reward):
        yield Finding(
            "fail",
            f"kl.placement={placement} with {asked}=false: no reference model is started, {key}={beta} acts on nothing",
            f"{asked}=true, with kl.estimator=none if the KL is only to be watched",
        )
    elif beta == 0 and estimator != "none":
        yield Finding(
            "warn",
            f"{key}=0: the reference model is loaded and run, and the KL only logged",
            f"{asked}=false saves the reference; kl.estimator=none says that monitoring is meant",
        )
    else:
        yield ok(f"reference: {at(config, 'actor_rollout_ref.model.path')} as it is at the start, {key}={beta}")
