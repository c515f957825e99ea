"""The preflight of OpenRLHF 0.11.2's resolved flags: its batch arithmetic, its KL, what it asks of a cluster.

The rules are OpenRLHF's own, from its script's asserts, DeepSpeedStrategy's accumulation and RayActorGroup's chunks;
each would stop a run, or let its ranks wait for each other, minutes later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kl_plugins.doctor.checks import Finding, ok
from kl_plugins.launch.needs import Needs, Pool, at, divides, is_path, sampling

VERSIONS = ("0.11.2",)
# OpenRLHF's defaults of the flags that are read here: a recipe does not repeat them.
DEFAULTS = {
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "ref.num_nodes": 1,
    "ref.num_gpus_per_node": 8,
    "critic.num_nodes": 1,
    "critic.num_gpus_per_node": 8,
    "critic.model_name_or_path": None,
    "reward.num_nodes": 1,
    "reward.num_gpus_per_node": 8,
    "reward.remote_url": None,
    "reward.model_name_or_path": None,
    "train.colocate_all": False,
    "train.colocate_actor_ref": False,
    "train.colocate_critic_reward": False,
    "train.async_enable": False,
    "train.agent_func_path": None,
    "train.batch_size": 128,
    "train.micro_batch_size": 1,
    "train.dynamic_batch_enable": False,
    "vllm.num_engines": None,
    "vllm.tensor_parallel_size": 1,
    "ds.ring_attn_size": 1,
    "ds.tensor_parallel_size": 1,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "rollout.micro_batch_size": 1,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "algo.kl.init_coef": 0.01,
    "algo.advantage.estimator": "gae",
    "ckpt.save_steps": -1,
    "ckpt.max_num": 3,
    "ckpt.disable_ds": False,
    "ckpt.save_hf": False,
    "actor.model_name_or_path": None,
    "data.prompt_dataset": None,
    "eval.dataset": None,
}
GROUPS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")


def needs(config: Mapping[str, Any]) -> Needs:
    """What a run of these flags asks of the cluster."""
    get = _getter(config)
    keys = ["actor.model_name_or_path", "data.prompt_dataset", "eval.dataset", "train.agent_func_path"]
    if _critic(get):
        keys.append("critic.model_name_or_path")
    keys.append("reward.remote_url" if get("reward.remote_url") else "reward.model_name_or_path")
    named = {}
    for key in keys:  # several models or data sets stand in one word, with commas
        for i, word in enumerate((get(key) or "").split(",")):
            named[f"{key}[{i}]" if i else key] = word
    # DeepSpeed: bf16 parameters, fp32 ones, Adam's two moments.
    saved = (0 if get("ckpt.disable_ds") else 14) * (2 if _critic(get) else 1) + (2 if get("ckpt.save_hf") else 0)
    return Needs(
        pools=tuple(_pools(get)),
        paths={key: word for key, word in named.items() if is_path(word)},
        modules=(),
        model=get("actor.model_name_or_path") or "",
        saved=saved,
        copies=get("ckpt.max_num") if get("ckpt.save_steps") > 0 else 0,
        at_end=2,
    )


def _getter(config: Mapping[str, Any]):
    return lambda key: at(config, key, DEFAULTS[key])


def _critic(get) -> bool:
    return get("algo.advantage.estimator") == "gae"


def _gpus(get, role: str) -> int:
    return get(f"{role}.num_nodes") * get(f"{role}.num_gpus_per_node")


def _pools(get) -> Iterator[Pool]:
    """One GPU and one core each; OpenRLHF asks Ray to pack them, not to keep a group on one node."""
    together = get("train.colocate_all")
    yield Pool("actor", _gpus(get, "actor"), 1, 1)
    if get("algo.kl.init_coef") > 0 and not (together or get("train.colocate_actor_ref")):
        yield Pool("reference", _gpus(get, "ref"), 1, 1)
    if not together:
        own_reward = not get("reward.remote_url")
        if _critic(get):
            yield Pool("critic", _gpus(get, "critic"), 1, 1)
        if own_reward and not (_critic(get) and get("train.colocate_critic_reward")):
            yield Pool("reward", _gpus(get, "reward"), 1, 1)
    if (get("vllm.num_engines") or 0) and (not together or get("train.async_enable")):
        yield Pool("vLLM", get("vllm.num_engines") * get("vllm.tensor_parallel_size"), 1, 1)


def findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Everything that can be said without a cluster."""
    get = _getter(config)
    yield from _arithmetic(get)
    yield from _kl(config, get)
    yield from sampling(get("rollout.temperature"), get("rollout.top_p"), -1, "rollout")
    yield Finding(
        "warn",
        f"OpenRLHF always trusts remote code: Python files that come with {get('actor.model_name_or_path')} are run on "
        "every node",
        "no flag changes it; use models whose files you know",
    )


def _arithmetic(get) -> Iterator[Finding]:
    gpus, copies = _gpus(get, "actor"), get("ds.ring_attn_size") * get("ds.tensor_parallel_size")
    n, responses = get("rollout.n_samples_per_prompt"), get("rollout.batch_size") * get("rollout.n_samples_per_prompt")
    batch, micro, sample = get("train.batch_size"), get("train.micro_batch_size"), get("rollout.micro_batch_size")
    what = "actor.num_nodes x actor.num_gpus_per_node"
    wrong = list(
        divides(copies, gpus, f"ds.ring_attn_size x ds.tensor_parallel_size and {what}", "change one of these flags")
    )
    ranks = max(1, gpus // copies)
    if get("algo.advantage.estimator") in GROUPS and n < 2:
        wrong.append(
            Finding(
                "fail",
                f"{get('algo.advantage.estimator')} compares the answers of one prompt, and "
                f"rollout.n_samples_per_prompt={n}",
                "rollout.n_samples_per_prompt=8, say",
            )
        )
    if get("train.colocate_all") and not get("train.async_enable"):
        engines = (get("vllm.num_engines") or 0) * get("vllm.tensor_parallel_size")
        if engines != gpus:
            wrong.append(
                Finding(
                    "fail",
                    f"train.colocate_all: vllm.num_engines x vllm.tensor_parallel_size is {engines}, {what} {gpus}",
                    "make them equal",
                )
            )
    shared = get("train.colocate_all") or get("train.colocate_actor_ref")
    sizes = [[get(f"{role}.num_nodes"), get(f"{role}.num_gpus_per_node")] for role in ("actor", "ref")]
    if shared and get("algo.kl.init_coef") > 0 and sizes[0] != sizes[1]:
        wrong.append(
            Finding(
                "fail",
                f"actor and reference share GPUs, and their num_nodes, num_gpus_per_node are {sizes[0]} and {sizes[1]}",
                "make them equal",
            )
        )
    if not get("train.dynamic_batch_enable"):
        chunks = -(-responses // sample)
        wrong += divides(
            ranks,
            chunks,
            f"ranks and the {responses} responses of a step in pieces of rollout.micro_batch_size={sample}",
            "change rollout.micro_batch_size",
        )
        wrong += divides(
            ranks * micro,
            batch,
            f"train.micro_batch_size={micro} x {ranks} ranks and train.batch_size",
            "change train.micro_batch_size",
        )
    else:
        wrong += divides(ranks, batch, f"{ranks} ranks and train.batch_size", "change train.batch_size")
    if responses % batch:
        wrong.append(
            Finding(
                "warn",
                f"the {responses} responses of a step are no multiple of train.batch_size={batch}: an update would mix "
                "responses of two steps",
                "change train.batch_size or rollout.batch_size",
            )
        )
    yield from wrong or [
        ok(
            f"batches: {get('rollout.batch_size')} prompts x {n} = {responses} responses a step, {responses // batch} "
            f"updates of {batch}, {batch // ranks} on each of {ranks} ranks"
        )
    ]


def _kl(config: Mapping[str, Any], get) -> Iterator[Finding]:
    """KL in two places, or a kl block without a reference, is refused when the flags are parsed."""
    beta = get("algo.kl.init_coef")
    if beta > 0 and not _gpus(get, "ref"):
        yield Finding(
            "fail",
            f"algo.kl.init_coef={beta} needs a reference model, and ref.num_nodes x ref.num_gpus_per_node is 0",
            "give it GPUs, or set algo.kl.init_coef=0 with kl.estimator=none",
        )
    elif beta > 0:
        yield ok(f"reference: {get('actor.model_name_or_path')} as it is at the start, algo.kl.init_coef={beta}")
    else:
        yield ok("algo.kl.init_coef=0: no reference model is started")
