"""One run from start to end: refuse early, train, show each step, say how it ended."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kl_plugins import __version__
from kl_plugins.launch.diagnose import diagnose
from kl_plugins.launch.metrics import Recorder, regularised_by_us
from kl_plugins.launch.plan import LaunchError, Plan, fresh
from kl_plugins.launch.process import Ended, supervise
from kl_plugins.launch.recipes import Recipe

# Exit codes beside 0; the command's help and the README have the same list.
FAILED = 1  # the framework ended with an error
REFUSED = 2  # nothing was started (also: wrong command line)
HOLLOW = 3  # ended well, but without our KL, or before the last step
LATE = 124  # --timeout or --stall


def make_plan(
    recipe: Recipe,
    *,
    profile: str | None = None,
    kl: Mapping[str, str] | None = None,
    steps: int | None = None,
    out: Path,
    native: list[str] | None = None,
    dry_run: bool = False,
    save_every: int | None = None,
    resume: bool = False,
) -> tuple[Plan, str]:
    """What would be run, and one sentence on what it descends.

    Raises:
        LaunchError: the recipe, the overrides or the KL configuration are wrong.
    """
    framework = import_module(f"kl_plugins.launch.{recipe.framework}")
    plan = framework.plan(
        recipe,
        profile=profile,
        kl=kl or {},
        steps=steps,
        out=out.absolute(),
        native=list(native or []),
        data=cache_dir() / "addition",
        dry_run=dry_run,
        save_every=save_every,
        resume=resume,
    )
    if resume and not dry_run and not plan.latest.exists():
        raise LaunchError(
            f"--resume: no checkpoint in {plan.latest.parent}: check --out, or drop --resume to start anew"
        )
    return plan, _describe(plan)


def cache_dir() -> Path:
    """Where things that cost time to make are kept: ``$KL_PLUGINS_CACHE``, else ``~/.cache/kl_plugins``."""
    return Path(os.environ.get("KL_PLUGINS_CACHE") or "~/.cache/kl_plugins").expanduser().absolute()


def _describe(plan: Plan) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's remarks about packages beside it
        from kl_plugins.schedule import (  # torch comes with it: not before there is something to check
            describe,
            read_block,
        )

    try:
        try:
            return describe(*read_block(plan.kl))
        except ValueError:
            theirs = [m for m in plan.env.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if "kl_plugins" not in m]
            if not any(theirs):
                raise
        for module in theirs:  # an estimator of the user's own may be registered there
            import_module(module)
        return describe(*read_block(plan.kl))
    except (ValueError, TypeError, ImportError) as error:
        raise LaunchError(str(error)) from error


def execute(
    plan: Plan, title: str, out: Path, *, timeout: float, stall: float, console: Console, resume: bool = False
) -> int:
    """Run `plan` in the folder `out`, showing each step on `console`; returns the exit code.

    Leaves ``config.yaml``, ``log.txt``, ``metrics.jsonl`` and, after at least one step, ``report.png``. With `resume`
    ``metrics.jsonl`` goes on from the first step that is made again, and the log so far becomes ``log.1.txt``.

    Raises:
        LaunchError: `out` holds a run already, and this is not its resumption.
    """
    log = out / "log.txt"
    if (out / "metrics.jsonl").exists() and not resume:
        raise LaunchError(f"{out} holds a run already: go on with --resume, or name another folder with --out")
    out.mkdir(parents=True, exist_ok=True)
    if log.exists():
        log.rename(fresh(log))
    head = [f"kl-plugins {__version__}, resolved. The framework's own command:", *plan.shell().splitlines()]
    (out / "config.yaml").write_text("".join(f"# {line}\n" for line in head) + plan.config)
    recorder = Recorder(plan.poll, plan.names, out / "metrics.jsonl")
    first = True
    with _status(console) as show:
        if plan.prepare:
            show("making the demo's model and data (about 20 s, once)")
            ended = supervise(plan.prepare, plan.env, log, timeout=timeout, stall=stall)
            if ended.why != "exit" or ended.code:
                return _finish(plan, ended, recorder, title, out, console)
        begin = time.monotonic()

        def tick() -> bool:
            rows = recorder.new_rows()
            nonlocal first
            for row in rows:
                if first:
                    console.print("    step     reward         kl    pg loss  seconds", style="bold")
                    first = False
                console.print(step_line(row, plan.steps), highlight=False)
            show(f"starting Ray, models and vLLM, {time.monotonic() - begin:.0f} s" if first else "training")
            return bool(rows)

        ended = supervise(plan.argv, plan.env, log, tick, timeout=timeout, stall=stall)
        show("ending")
    return _finish(plan, ended, recorder, title, out, console)


def step_line(row: Mapping[str, Any], steps: int | None) -> str:
    """One step as one line."""

    def number(value: float | None, form: str, width: int) -> str:
        return format("-" if value is None else format(value, form), f">{width}")

    step = f"{row['step']}/{steps}" if steps else str(row["step"])
    return (
        f"{step:>8} {number(row['reward'], '.4f', 10)} {number(row['kl'], '.6f', 10)} "
        f"{number(row['pg_loss'], '.6f', 10)} {number(row['seconds'], '.1f', 8)}"
    )


@contextmanager
def _status(console: Console) -> Iterator[Callable[[str], None]]:
    """A live line while nothing happens, on a terminal; elsewhere nothing, so that logs stay clean."""
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
    else:
        yield lambda text: None


def _finish(plan: Plan, ended: Ended, recorder: Recorder, title: str, out: Path, console: Console) -> int:
    rows = recorder.rows
    code, problem, remedy = verdict(plan, ended, rows)
    if rows:
        from kl_plugins.report.figure import save_figure

        console.print(summary(rows))
        save_figure(rows, out / "report.png", title)

    def say(label: str, text: object, style: str = "bold red") -> None:
        console.print(f"[{style}]{label}:[/] {escape(str(text))}", highlight=False, soft_wrap=True)

    for process in ended.left:
        say("still running", f"{process}: end it by hand")
    if problem:
        say("failed", problem)
        if remedy:
            say("to do", remedy)
        elif ended.why != "signal":
            cause = diagnose(out / "log.txt", ended.code, ended.logged)
            say("cause", cause.line)
            if cause.first:
                say("the log's first error", cause.first)
            say("to do", cause.remedy)
        if plan.latest.exists():
            say("to go on", f"--resume --out {out} (last checkpoint: {plan.latest.read_text().strip()})", "bold")
        say("log", out / "log.txt", "bold")
    else:
        say("done", f"{ended.seconds:.0f} s; report.png, metrics.jsonl, config.yaml, log.txt in {out}", "bold green")
    return code


def verdict(plan: Plan, ended: Ended, rows: list[dict[str, Any]]) -> tuple[int, str, str]:
    """Exit code, what went wrong, if anything did, and what to do about it, if it can be told without the log."""
    after = f"after step {rows[-1]['step']}" if rows else "before the first step"
    if ended.why == "signal":
        return 128 + ended.code, f"interrupted {after}", ""
    if ended.why == "timeout":
        return LATE, f"still running after {ended.seconds:.0f} s (--timeout), {after}", ""
    if ended.why == "stall":
        return LATE, f"no new step for longer than --stall, {after}", ""
    if ended.code:
        return FAILED, f"the command ended with status {ended.code}, {after}", ""
    if not rows:
        return HOLLOW, "the command ended well and made no step", "Look for the number of steps in config.yaml and log."
    if not regularised_by_us(rows):
        remedy = "Look in the log for [kl_plugins]; the recipe's kl block has to reach the actor (see recipes/)."
        return HOLLOW, "steps without kl/ metrics: this was not trained with this package's KL", remedy
    if plan.steps and rows[-1]["step"] < plan.steps:
        remedy = "Raise the number of epochs (trainer.total_epochs, train.num_episodes), or lower --steps."
        return HOLLOW, f"ended well after step {rows[-1]['step']} of {plan.steps}", remedy
    return 0, "", ""


def summary(rows: list[dict[str, Any]]) -> Table:
    """First and last steps side by side, each a mean over a fifth of the run."""
    span = max(1, len(rows) // 5)
    few = f"mean of {span} steps" if span > 1 else "one step"
    table = Table(title=f"{len(rows)} steps", caption=f"first, last: {few}")
    for heading in ("", "first", "last"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, key in (
        ("reward", "reward"),
        ("KL to the reference (nats a token)", "kl/sampled"),
        ("KL as the framework logs it", "kl"),
        ("KL gradient, mean |coefficient|", "kl/coef_mean"),
        ("policy loss", "pg_loss"),
        ("seconds a step", "seconds"),
    ):
        means = [_mean([row.get(key) for row in part]) for part in (rows[:span], rows[-span:])]
        table.add_row(name, *("-" if mean is None else f"{mean:.4g}" for mean in means))
    return table


def _mean(values: list[float | None]) -> float | None:
    numbers = [v for v in values if v is not None]
    return sum(numbers) / len(numbers) if numbers else None


def default_out(recipe: Recipe) -> Path:
    """A folder that no other run has: ``runs/<recipe>-<time>``."""
    return Path("runs") / f"{recipe.name.replace('/', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"


def stdout_console() -> Console:
    """A console on standard output that does not break lines where there is no terminal to fit."""
    return Console(width=None if sys.stdout.isatty() else 120)
