"""The commands `submit`, `status`, `logs` and `stop`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from kl_plugins.doctor.cli import MARKS
from kl_plugins.launch import options

REFUSED, INTERRUPTED = 2, 130

SUBMIT_HELP = """Train a recipe as a job on a Ray cluster, from any machine that has Ray and the recipe's framework.

This package travels with the job; the cluster's nodes need the framework alone. Recipe, options and words are those
of `kl-plugins run`, which is the job's command. A preflight looks at configuration and cluster first, and says all it
finds: failures stop the submission.

Exit codes: 0 submitted, or, with --wait, succeeded; 1 the job failed; 2 refused, nothing was submitted; 3 the job was
stopped; 4 the connection broke, the job may go on; 130 Ctrl-C, the job goes on.
"""

Address = Annotated[
    str, typer.Option("--address", help="The cluster's dashboard: http://HEAD:8265.", metavar="URL", show_default=False)
]
JobId = Annotated[str, typer.Argument(help="The job's id, as `kl-plugins submit` printed it.", metavar="JOB")]


def submit(
    recipe: Annotated[str, typer.Argument(help="A name such as verl/grpo_k2, or a path, which travels along.")],
    address: Address,
    native: options.Native = None,
    profile: options.Profile = None,
    steps: options.Steps = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--out",
            help="Folder of the run, which every node has to see; default: runs/<recipe>-<time> from here.",
            metavar="DIR",
        ),
    ] = None,
    save_every: options.SaveEvery = None,
    resume: options.Resume = False,
    timeout: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--timeout", help="As for `run`: end the run after so many seconds.", min=0, metavar="SECONDS"),
    ] = None,
    stall: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--stall", help="As for `run`: end it after so many without a step.", min=0, metavar="SECONDS"),
    ] = None,
    python: Annotated[
        str, typer.Option("--python", help="The interpreter on the cluster's head: a name or a path.", metavar="WORD")
    ] = "python",
    runtime_env: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--runtime-env", help="YAML of your own for the job's Ray runtime env.", metavar="FILE"),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show the log and end as the job ends.")] = False,
    preflight_only: Annotated[
        bool, typer.Option("--preflight-only", help="Look at configuration and cluster, submit nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the `ray job submit` line; ask the cluster nothing.")
    ] = False,
    kl_estimator: options.Estimator = None,
    kl_report: options.Report = None,
    kl_placement: options.Placement = None,
    kl_form: options.Form = None,
    kl_correction: options.Correction = None,
    kl_clip_low: options.ClipLow = None,
    kl_clip_high: options.ClipHigh = None,
    kl_ratio: options.Ratio = None,
    kl_ratio_cap: options.RatioCap = None,
    kl_credit: options.Credit = None,
    kl_coefficient_bound: options.CoefficientBound = None,
    kl_check_finite: options.CheckFinite = None,
    kl_allow_vacuous: options.AllowVacuous = None,
) -> None:
    kl = options.given(locals())
    from kl_plugins.launch import preflight
    from kl_plugins.launch import submit as jobs
    from kl_plugins.launch.plan import LaunchError
    from kl_plugins.launch.recipes import find_recipe
    from kl_plugins.launch.run import default_out

    try:
        found = find_recipe(recipe)
        options.refuse_misspelt(native or [], "submit")
        if resume and out is None:
            raise LaunchError("--resume needs --out, the folder of the run that is to go on")
        client = None if dry_run else jobs.connect(address)
        job, sentence = jobs.make_job(
            found,
            profile=profile,
            kl=kl,
            steps=steps,
            out=out or default_out(found),
            native=native,
            save_every=save_every,
            resume=resume,
            limits={"timeout": timeout, "stall": stall},
            python=python,
            given=jobs.read_runtime_env(runtime_env),
        )
        # Where the line is to be pasted, standard output is the line alone.
        _say(f"{found.name}{f', profile {profile}' if profile else ''}: {sentence}", err=dry_run)
        findings = preflight.check(job)
        if client is not None:
            findings += preflight.ask(client, job, address)
        for finding in findings:
            _say(f"{MARKS[finding.level]} {finding.text}", err=dry_run)
            if finding.remedy:
                _say(f"     -> {finding.remedy}", err=dry_run)
        preflight.require(findings)
        if dry_run:
            _say(jobs.shell(job, address))
        if client is None or preflight_only:
            return
        name = jobs.send(client, job, address)
    except (LaunchError, jobs.Lost) as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    _say(f"job {name}; the run's folder is {job.out}")
    if wait:
        raise typer.Exit(_follow(client, name, address))
    _say(f"follow it: kl-plugins logs {name} --address {address} --follow")


def _say(text: str, err: bool = False) -> None:
    typer.echo(text, err=err)


@contextmanager
def _refusing() -> Iterator[None]:
    from kl_plugins.launch.plan import LaunchError
    from kl_plugins.launch.submit import LOST, Lost

    try:
        yield
    except LaunchError as error:
        typer.echo(f"refused: {error}", err=True)
        raise typer.Exit(REFUSED) from error
    except Lost as error:
        typer.echo(f"lost: {error}", err=True)
        raise typer.Exit(LOST) from error


def _follow(client: Any, job: str, address: str) -> int:
    """Show the log until the job ends; returns the exit code."""
    from kl_plugins.launch import submit as jobs

    again = f"kl-plugins logs {job} --address {address} --follow"
    try:
        ended = jobs.follow(client, job, address, lambda piece: typer.echo(piece, nl=False))
        _say(jobs.ending(client, job, address))
        return jobs.ENDS[ended]
    except jobs.Lost as error:
        typer.echo(f"lost: {error}. The job may go on; follow it again: {again}", err=True)
        return jobs.LOST
    except KeyboardInterrupt:
        typer.echo(f"\nThe job goes on. Follow it: {again}", err=True)
        typer.echo(f"End it: kl-plugins stop {job} --address {address}", err=True)
        return INTERRUPTED


def status(job: JobId, address: Address) -> None:
    """Say how a job is doing. Exit codes: 0 it runs, waits or succeeded; 1 failed; 2 no such job; 3 stopped."""
    from kl_plugins.launch import submit as jobs

    with _refusing():
        client = jobs.connect(address)
        _say(jobs.ending(client, job, address))
        raise typer.Exit(jobs.ENDS.get(jobs.status(client, job, address), 0))


def logs(
    job: JobId,
    address: Address,
    follow: Annotated[bool, typer.Option("--follow", help="Until the job ends; exit codes as submit's.")] = False,
) -> None:
    """Show a job's log."""
    from kl_plugins.launch import submit as jobs

    with _refusing():
        client = jobs.connect(address)
        if follow:
            raise typer.Exit(_follow(client, job, address))
        with jobs.asked(address, job):
            typer.echo(client.get_job_logs(job), nl=False)


def stop(job: JobId, address: Address) -> None:
    """Stop a job, and wait until it has ended."""
    from kl_plugins.launch import submit as jobs

    with _refusing():
        client = jobs.connect(address)
        before = jobs.status(client, job, address)
        if before in jobs.ENDS:
            _say(f"job {job} had ended already: {before}")
        else:
            _say(f"job {job}: {jobs.stop(client, job, address)}")


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command(
        help=SUBMIT_HELP,
        context_settings={
            "ignore_unknown_options": True,
            "token_normalize_func": lambda word: word.replace("_", "-"),
        },
    )(submit)
    for command in (status, logs, stop):
        app.command()(command)
