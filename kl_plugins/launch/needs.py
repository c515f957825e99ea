"""What a resolved configuration asks of a cluster, in the terms of neither framework."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kl_plugins.doctor.checks import Finding, ok


@dataclass(frozen=True)
class Pool:
    """`nodes` times `gpus` GPUs that have to be on one node, with `cpus` cores for each; `what` they are for."""

    what: str
    nodes: int
    gpus: int
    cpus: int


@dataclass(frozen=True)
class Needs:
    """Attributes:

    pools: GPUs, by what has to be on one node.
    paths: key -> a file or folder that every node has to see.
    modules: Python modules that every node has to have, beside the framework.
    model: path or hub name of the policy's model, which is also the reference's.
    saved: bytes that one checkpoint takes for each of the model's parameters.
    copies: checkpoints that are kept at a time.
    at_end: bytes for each parameter that are written once more at the end.
    passed: the runtime env that the framework itself gives to ray.init beside this job's.
    waits: whether the framework waits for GPUs in use, instead of giving up.
    """

    pools: tuple[Pool, ...]
    paths: dict[str, str]
    modules: tuple[str, ...]
    model: str
    saved: float
    copies: int
    at_end: float = 0.0
    passed: dict[str, Any] = field(default_factory=dict)
    waits: bool = True

    @property
    def gpus(self) -> int:
        return sum(pool.nodes * pool.gpus for pool in self.pools)


def at(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value of a dotted key; `default` where it, or a part of its path, is absent or null."""
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return default if node is None else node


def is_path(text: str) -> bool:
    """Whether a model's or data set's name is a path, and not one on a hub: those have one slash and no suffix."""
    if "://" in text:
        return False
    return text.startswith(("/", "~", "./", "../")) or text.endswith((".json", ".jsonl", ".parquet", ".csv", ".py"))


def divides(part: int, whole: int, wrong: str, remedy: str) -> Iterator[Finding]:
    """A failure, "`wrong`: part does not divide whole", if it does not; `part` and `whole` are positive."""
    if whole % part:
        lower = [d for d in range(1, part) if whole % d == 0][-1:]
        higher = [d for d in range(part + 1, whole + 1) if whole % d == 0][:1]
        near = " or ".join(map(str, lower + higher))
        yield Finding(
            "fail", f"{wrong}: {part} does not divide {whole}", f"{remedy}{f' ({near} would)' if near else ''}"
        )


def sampling(temperature: float, top_p: float, top_k: int, key: str) -> Iterator[Finding]:
    """Sampler, policy and reference have to be of one temperature; both frameworks take it from one key (case 19)."""
    if temperature <= 0:
        yield Finding(
            "fail",
            f"{key}.temperature={temperature}: the frameworks divide the policy's and the reference's logits by it",
            f"sample for training at a positive temperature: {key}.temperature=1.0",
        )
    else:
        yield ok(f"temperature {temperature} for sampler, policy and reference alike ({key}.temperature)")
    if top_p < 1 or top_k > 0:
        yield Finding(
            "warn",
            f"{key}: top_p={top_p}, top_k={top_k} cut the sampler's distribution, and policy and reference are scored "
            "uncut: the measured KL is not that of the policy that sampled",
            f"{key}.top_p=1.0 and no top_k, unless that is meant",
        )


def parameters(sizes: Mapping[str, int] | None) -> int | None:
    """How many parameters a decoder has, from the integers of its config.json; None if they do not tell.

    Embedding, attention with grouped queries, gated MLP (each expert's, if there are several), output head.
    """
    try:
        hidden, layers, vocabulary = (sizes[k] for k in ("hidden_size", "num_hidden_layers", "vocab_size"))
        heads = sizes["num_attention_heads"]
        inner = sizes.get("moe_intermediate_size", sizes["intermediate_size"])
    except (KeyError, TypeError):
        return None
    wide = heads * sizes.get("head_dim", hidden // heads)
    attention = 2 * hidden * (wide + wide * sizes.get("num_key_value_heads", heads) // heads)
    experts = sizes.get("num_experts", sizes.get("num_local_experts", 1))
    return layers * (attention + 3 * hidden * inner * experts) + 2 * vocabulary * hidden


def multiple(of: int, *parts: int) -> int:
    """`of` rounded up to the next common multiple of `parts`."""
    step = math.lcm(*parts)
    return -(-of // step) * step
