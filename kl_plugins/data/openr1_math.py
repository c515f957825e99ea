"""OpenR1-Math-220k as prompts for GRPO: the problems with a verified trace of at most 2048 tokens.

The choice is that of https://arxiv.org/abs/2510.01555. A row of the data set is a problem with its answer and several
traces of DeepSeek-R1, each marked as complete or not and as verified by Math-Verify or not. The traces serve to choose
problems of bearable length and are then left out.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kl_plugins.data.answers import SYSTEM_PROMPT

HUB_NAME = "open-r1/OpenR1-Math-220k"
FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json"}
COLUMNS = ("problem", "answer", "generations", "is_reasoning_complete", "correctness_math_verify")
BATCH = 256  # rows tokenized at once


@dataclass(frozen=True)
class Settings:
    """What is kept.

    Attributes:
        tokenizer: path or hub name of the tokenizer that counts; it needs a chat template.
        trace_tokens: a row needs a verified, complete trace of at most so many tokens.
        prompt_tokens: longest prompt, chat template included; what the recipes leave for it.
        val_rows: rows held out for validation, those whose problems have the lowest hashes; 0 for none.
        limit: stop at so many kept rows; None takes all.
        revision: of the data set on the hub; a commit makes two runs the same for ever.
    """

    tokenizer: str = "Qwen/Qwen2.5-Math-1.5B"
    trace_tokens: int = 2048
    prompt_tokens: int = 1024
    val_rows: int = 128
    limit: int | None = None
    revision: str = "main"


def prepare(out: Path, settings: Settings, source: Path | None = None) -> dict[str, Any]:
    """Write `train` and `val`, each as .parquet in verl's columns and .jsonl in OpenRLHF's, and `summary.json`.

    The same source and settings give the same files: rows keep the source's order, nothing is drawn.

    Args:
        out: a folder that is empty or not there yet.
        settings: what is kept.
        source: a .parquet, .json or .jsonl file with the data set's columns; None takes it from the hub.

    Returns:
        What is in `summary.json`: source, settings, and how many rows were dropped for which reason.

    Raises:
        FileExistsError: `out` holds files.
        OSError: the source or the tokenizer cannot be had.
        ValueError: a column is missing, the tokenizer has no chat template, or too few rows are left.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: name another folder with --out, or empty it")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    tokenizer = _tokenizer(settings.tokenizer)
    rows, total = _rows(source, settings.revision)
    counts: collections.Counter[str] = collections.Counter()
    kept: list[dict[str, Any]] = []
    columns = (
        TextColumn("filtering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[kept]} kept"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, kept=0)
        for batch in _batches(rows, BATCH):
            kept += _filter(batch, tokenizer, settings, counts)
            progress.update(task, advance=len(batch), kept=len(kept))
            if settings.limit is not None and len(kept) >= settings.limit:
                kept = kept[: settings.limit]
                break
    if len(kept) <= settings.val_rows:
        raise ValueError(
            f"{len(kept)} rows are left of {source or HUB_NAME}, and {settings.val_rows} of them are wanted for "
            f"validation ({dict(counts)}): lower --val-rows, or raise --limit or --trace-tokens"
        )
    held_out = set(sorted(range(len(kept)), key=lambda i: _hash(kept[i]["problem"]))[: settings.val_rows])
    parts = {
        "train": [row for i, row in enumerate(kept) if i not in held_out],
        "val": [row for i, row in enumerate(kept) if i in held_out],
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        _write(out / name, part)
    summary = {
        "source": str(source) if source else HUB_NAME,
        "settings": asdict(settings),
        "rows": dict(counts),
        **{name: len(part) for name, part in parts.items()},
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer {name} has no chat template: give one that has with --tokenizer")
    return tokenizer


def _rows(source: Path | None, revision: str) -> tuple[Iterator[dict[str, Any]], int | None]:
    """The rows with the columns needed, and their number where the source tells it beforehand."""
    import datasets

    if source is None:
        try:
            rows = datasets.load_dataset(HUB_NAME, split="train", revision=revision, streaming=True)
        except OSError as error:
            raise OSError(f"{HUB_NAME} cannot be had from the hub ({error}): give a copy of it with --from") from error
    else:
        if not source.is_file():
            raise FileNotFoundError(f"--from {source}: no such file")
        if source.suffix not in FORMATS:
            raise ValueError(f"--from {source}: the name has to end in {', '.join(FORMATS)}")
        rows = datasets.load_dataset(FORMATS[source.suffix], data_files=str(source), split="train", streaming=True)
    known = rows.column_names or list(next(iter(rows), {}))
    missing = [column for column in COLUMNS if column not in known]
    if missing:
        raise ValueError(f"{source or HUB_NAME} lacks the column {', '.join(missing)}; it has {', '.join(known)}")
    splits = rows.info.splits
    total = splits["train"].num_examples if splits else None
    return iter(rows.select_columns([*COLUMNS, *(["uuid"] if "uuid" in known else [])])), total


def _batches(rows: Iterator[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    batch = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _filter(
    batch: Sequence[dict[str, Any]], tokenizer: Any, settings: Settings, counts: collections.Counter[str]
) -> Iterator[dict[str, Any]]:
    """The rows of `batch` that stay, with `prompt` (a chat) and `trace_tokens`; `counts` says why others go."""
    chats = [_chat(row["problem"]) for row in batch]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    traces = [_verified(row) for row in batch]
    trace_lengths = iter(_lengths(tokenizer, [trace for of_row in traces for trace in of_row]))
    for row, chat, prompt_length, of_row in zip(batch, chats, _lengths(tokenizer, prompts), traces, strict=True):
        shortest = min((next(trace_lengths) for _ in of_row), default=None)
        counts["read"] += 1
        if not (row["answer"] or "").strip():
            counts["without an answer"] += 1
        elif shortest is None:
            counts["without a verified trace"] += 1
        elif shortest > settings.trace_tokens:
            counts["trace too long"] += 1
        elif prompt_length > settings.prompt_tokens:
            counts["prompt too long"] += 1
        else:
            yield {**row, "prompt": chat, "trace_tokens": shortest}


def _chat(problem: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": problem}]


def _verified(row: dict[str, Any]) -> list[str]:
    """The traces that came to their end and whose answer Math-Verify found right; a missing mark is a no."""
    marks = zip(row["generations"], row["is_reasoning_complete"], row["correctness_math_verify"], strict=False)
    return [trace for trace, complete, verified in marks if complete and verified]


def _lengths(tokenizer: Any, texts: list[str]) -> list[int]:
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write(stem: Path, rows: Sequence[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    table = [
        {
            "data_source": HUB_NAME,
            "ability": "math",
            "prompt": row["prompt"],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": i, "uuid": row.get("uuid"), "trace_tokens": row["trace_tokens"]},
        }
        for i, row in enumerate(rows)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table, schema=_schema()), stem.with_suffix(".parquet"))
    lines = [json.dumps({"input": row["prompt"], "label": row["answer"]}, ensure_ascii=False) for row in rows]
    stem.with_suffix(".jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def _schema() -> Any:
    """Given, not inferred: a part without rows, or without one uuid, has the same columns as any other."""
    import pyarrow as pa

    text = pa.string()
    return pa.schema(
        {
            "data_source": text,
            "ability": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct({"index": pa.int64(), "uuid": text, "trace_tokens": pa.int64()}),
        }
    )
