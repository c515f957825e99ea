"""Reads TensorBoard's event files, of runs that were made without this package, into rows like ``metrics.jsonl``'s.

verl writes its scalars under their own names (``actor/kl_loss``), OpenRLHF under ``train/`` (``train/kl``).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

from kl_plugins.launch.metrics import step_row

EVENTS = "events.out.tfevents.*"
NAMES = {
    "reward": ("critic/score/mean", "critic/rewards/mean", "rollout/reward_mean", "reward"),
    "kl": ("kl/sampled", "actor/kl_loss", "actor/reward_kl_penalty", "kl"),
    "pg_loss": ("actor/pg_loss", "policy_loss"),
    "seconds": ("timing_s/step", "timing/step_total"),
}


def event_files(path: Path) -> list[Path]:
    """The event files in the folder `path` or below it; `path` itself if it is one."""
    if path.is_file():
        return [path] if path.match(EVENTS) else []
    return sorted(path.rglob(EVENTS))


def read_events(path: Path) -> list[dict[str, Any]]:
    """One row for each step of the event files in the folder `path` (or of the one file), in order.

    A file that was cut in mid-write is read up to there. Of a step that was written twice the last one counts, and
    what a run that was resumed had written beyond its checkpoint does not (TensorBoard's own rule).

    Raises:
        ImportError: TensorBoard is not installed.
        ValueError: no scalar in there.
    """
    try:
        from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator
    except ImportError as error:
        raise ImportError(
            f"{path}: event files are read with TensorBoard, which is not installed: pip install tensorboard"
        ) from error
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of each cut file, and we of none
    # 0 keeps all of a kind; of texts and pictures, which we do not read, it keeps one.
    kinds = ("tensors", "images", "audio", "histograms", "compressedHistograms")
    events = EventAccumulator(str(path), size_guidance={SCALARS: 0, **dict.fromkeys(kinds, 1)})
    events.Reload()
    records: dict[int, dict[str, Any]] = defaultdict(dict)
    for tag in events.Tags()[SCALARS]:
        for event in events.Scalars(tag):
            records[event.step][tag.removeprefix("train/")] = event.value
    if not records:
        raise ValueError(f"{path}: no scalar in its event files; expected verl's (actor/…) or OpenRLHF's (train/…)")
    return [step_row({**record, "step": step}, NAMES) for step, record in sorted(records.items())]
