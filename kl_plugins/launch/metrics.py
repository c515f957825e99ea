"""The framework's metrics, step by step: one row a step, with the same few names for either framework."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SHOWN = ("reward", "kl", "pg_loss", "seconds")


class JsonLines:
    """Reads a growing file of JSON objects: `poll` gives those that are complete and were not given before."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0

    def poll(self) -> list[dict[str, Any]]:
        """New objects in the order of the file; ``[]`` while there is no file."""
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]  # the last line may be half written
        self.offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


class Recorder:
    """Turns metric records into rows, keeps them, and writes each to ``metrics.jsonl`` as it comes.

    Where the file holds rows of a run that is resumed, they stay up to the step with which it goes on.
    """

    def __init__(self, poll: Callable[[], list[dict[str, Any]]], names: Mapping[str, tuple[str, ...]], path: Path):
        self.poll = poll
        self.names = names
        self.path = path
        path.touch()
        self.rows = read_rows(path)  # training steps
        self.resumed = bool(self.rows)

    def new_rows(self) -> list[dict[str, Any]]:
        """Rows of the training steps that ended since the last call. Validation alone is written, but is no step."""
        fresh, records = [], self.poll()
        if records and self.resumed:
            self._cut(int(records[0]["step"]))
        with open(self.path, "a") as file:
            for record in records:
                row = step_row(record, self.names)
                file.write(json.dumps(row) + "\n")
                if row["pg_loss"] is not None:
                    fresh.append(row)
        self.rows += fresh
        return fresh

    def _cut(self, step: int) -> None:
        """Drop the rows from ``step`` on: they are being made again."""
        lines = [line for line in self.path.read_text().splitlines() if json.loads(line)["step"] < step]
        self.path.write_text("".join(f"{line}\n" for line in lines))
        self.rows, self.resumed = read_rows(self.path), False


def step_row(record: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """``{"step", "reward", "kl", "pg_loss", "seconds", **every scalar of the record}``, null where there is none.

    A scalar that is not finite becomes null too: NaN is not JSON, and readers should not have to guess.
    """
    scalars = {name: _scalar(value) for name, value in record.items() if name != "step"}
    row: dict[str, Any] = {"step": int(record["step"])}
    for shown in SHOWN:
        row[shown] = next((scalars[n] for n in names[shown] if scalars.get(n) is not None), None)
    return row | {name: value for name, value in scalars.items() if name not in row}


def _scalar(value: Any) -> float | str | None:
    if isinstance(value, (int, float)):
        return float(value) if math.isfinite(value) else None
    return value if isinstance(value, str) else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The training steps of a ``metrics.jsonl``."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [row for row in rows if row.get("pg_loss") is not None]


def regularised_by_us(rows: list[dict[str, Any]]) -> bool:
    """True if every step carries the plugin's own metrics (``kl/...``): a step without them was not ours."""
    return bool(rows) and all(any(name.startswith("kl/") for name in row) for row in rows)
