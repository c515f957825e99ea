"""From the log of a run that died or hung: what happened, and what to do about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TAIL = 4 << 20  # bytes of the log that are read


@dataclass(frozen=True)
class Cause:
    """The line of the log that says what happened, what to do, and the log's first error if that is another."""

    line: str
    remedy: str
    first: str = ""


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Ray puts the writer before each line of another process: "(WorkerDict pid=123, ip=10.0.0.1) ", "(raylet) ".
_WRITER = re.compile(
    r"^(?:\x1b\[[0-9;]*m)*\((?:[^()=]*\b(?:pid|ip)=[^)]*|raylet|gcs_server|autoscaler[^)]*)\)(?:\x1b\[[0-9;]*m)*\s?"
)
_RAISED = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?_?(?:[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Failure)|Exception)\b(?:\(\w+\))?(?::|$)"
)
# What other processes raise because one of them has died, and what Ray wraps around the real exception.
_ECHO = re.compile(
    r"^(?:ray\.exceptions\.)?(?:RayTaskError|ActorDiedError|ActorUnavailableError|RayActorError|WorkerCrashedError|"
    r"TaskCancelledError|EngineDeadError|SystemExit|KeyboardInterrupt|BrokenPipeError|EOFError)"
    r"|EngineDeadError|concurrent\.futures|Engine core initialization failed|was the direct cause"
)

_UNBORN = "Exception raised in creation task"
# First match wins, and a rule is looked for in the whole tail, before any last exception: these say why others follow.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        (
            r"(?:CUDA|HIP|NPU) out of memory|torch\.(?:cuda\.)?OutOfMemoryError",
            "Lower the micro-batch sizes or the response length, give vLLM a smaller share of the memory "
            "(gpu_memory_utilization), or use more devices.",
        ),
        (
            r"ray\.exceptions\.OutOfMemoryError|killed due to (?:the node running low on )?memory|memory pressure|"
            r"Cannot allocate memory|^MemoryError|oom-kill",
            "The machine ran out of memory: free some, or lower batch sizes and the number of workers.",
        ),
        (
            r"No space left on device|Errno 28\b",
            "Free disk space (Ray writes to /tmp/ray and /dev/shm, the run to its --out folder).",
        ),
        (
            r"Address already in use|EADDRINUSE|Errno 98\b",
            "Another process holds the port: end it, or choose another port for this run.",
        ),
        (
            r"InvalidAuthToken|AuthenticationError.*[Rr]ay|authentication token",
            "The Ray cluster wants a token: set RAY_AUTH_MODE=token where the driver starts.",
        ),
        (
            r"Failed to merge the (?:Job's|[Jj]ob).*runtime env|both in the job.*runtime",
            "The Ray job and the framework's own ray.init set the same runtime_env key: drop it from the job's.",
        ),
        (
            r"Total available GPUs .* less than|No available node types can fulfill|cannot be scheduled right now|"
            r"[Pp]lacement group .*(?:infeasible|not ready|[Tt]imed? ?out)|insufficient resources|does not have enough",
            "Ray cannot place the workers: ask for no more devices than the machine has (trainer.n_gpus_per_node for "
            "verl, actor.num_gpus_per_node and vllm.num_engines for OpenRLHF), or try --profile cpu.",
        ),
        (
            r"missed too many heartbeats|node timed out during startup",
            "Ray's daemon got no time to run, or was killed: stop other work on the machine, then run again.",
        ),
        (
            r"DriftError|KL_PLUGINS_ALLOW_UNKNOWN",
            "The framework is not a version this package was tested with: install a supported one, or set the switch.",
        ),
        (
            r"without (?:calling|asking) kl_plugins|did not go through kl_plugins|"
            r"ppo_loss that is not kl_plugins",
            "The KL plugin is not active in the worker: check that this kl-plugins is installed in the framework's "
            "environment and that nothing else replaces the KL loss.",
        ),
        (
            r"is not finite at \d+ of \d+ unmasked tokens|non-finite input at an unmasked token",
            "A log-probability is NaN or infinite at a token that counts: look at the learning rate and the attention "
            "mask; kl.check_finite=false turns the check off, not the cause.",
        ),
        (
            r"is not a local folder and is not a valid model identifier|Can't load (?:tokenizer|the configuration)|"
            r"OfflineModeIsEnabled|LocalEntryNotFoundError|HFValidationError|couldn't connect to '?https|"
            r"Incorrect path_or_model_id|RepositoryNotFoundError",
            "The model or data set cannot be found: give a local folder, or check its name and the connection.",
        ),
        (
            r"No module named '?flash_attn|flash_attn.* not (?:be )?(?:installed|available)|be not installed.*flash",
            "Install flash-attn, or choose another attention (attn_implementation=sdpa).",
        ),
        (
            r"NCCL error|ncclSystemError|ncclUnhandledCudaError|NCCL.*timed? ?out",
            "The devices cannot talk to each other: run again with NCCL_DEBUG=INFO and see the log.",
        ),
    )
)
_LATE_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        (r"^ModuleNotFoundError|^ImportError", "Install what is missing in the environment that runs the framework."),
        (r"^FileNotFoundError|does not exist", "Correct the path; relative ones start where the command was typed."),
        (
            r"divisible|% .* == 0|equal chunk|micro.?batch",
            "Make the batch sizes divide each other: prompts x responses by ranks, mini-batch by micro-batch.",
        ),
        (
            r"unexpected keyword argument|ConfigKeyError|ConfigAttributeError|InstantiationException|"
            r"Could not override|is not in struct|unrecognized arguments",
            "A key of the configuration is not known to the framework: correct or remove it.",
        ),
        (r"kl\.[a-z_]+=|unknown (?:KL )?estimator", "Correct the kl block of the recipe, or the --kl_... option."),
        (r"^(?:\S*\.)?TimeoutError|timed? ?out", "Something did not answer in time: see the log before this line."),
        (
            r"^ray\.exceptions\.(?:ActorDiedError|WorkerCrashedError|ActorUnavailableError|RayActorError|NodeDiedError)",
            "A worker process ended without an exception of its own: killed (kernel log, memory), or its node is gone "
            "(`ray status`).",
        ),
    )
)
_SEE_LOG = "See the log around this line."


def diagnose(log: Path, code: int | None = None, size: int | None = None) -> Cause:
    """The cause that the first `size` bytes of `log` give for the end of a run.

    `code` is the child's exit status, if it ended by itself.

    Known root causes come first wherever they stand, then what ended an actor that was just being made, which others
    wait for in vain; else it is the driver's last exception, or that of a worker if the driver only says that a worker
    died; else the last line.
    """
    with open(log, "rb") as file:
        size = log.stat().st_size if size is None else size
        start = file.seek(max(0, size - TAIL))
        raw = file.read(size - start).decode(errors="replace").splitlines()
    lines = [(_ANSI.sub("", _WRITER.sub("", line)).strip(), bool(_WRITER.match(line))) for line in raw]
    for pattern, remedy in _RULES:
        for text, _ in lines:
            if pattern.search(text):
                return Cause(_short(text), remedy)
    raised = [(i, text, worker) for i, (text, worker) in enumerate(lines) if _RAISED.match(text)]
    genuine = [r for r in raised if not _ECHO.search(r[1])]
    unborn = next((i for i, (text, _) in enumerate(lines) if _UNBORN in text), len(lines))
    for wanted in (
        [r for r in genuine if r[0] > unborn][:1],
        [r for r in genuine if not r[2]],
        genuine,
        raised,
    ):
        if wanted:
            i, text, _ = wanted[-1]
            if text.endswith(":") and i + 1 < len(lines):  # Hydra puts what was raised on the next line
                text += " " + lines[i + 1][0]
            remedy = next((remedy for pattern, remedy in _LATE_RULES if pattern.search(text)), _SEE_LOG)
            first = genuine[0][1] if genuine and genuine[0][1] not in text else ""
            return Cause(_short(text), remedy, _short(first))
    if code is not None and code < 0:
        what = f"killed by signal {-code}" + (" (SIGKILL, often for want of memory)" if code == -9 else "")
        return Cause(what, "Look at the machine's memory and its kernel log.")
    last = next((text for text, _ in reversed(lines) if text), "")
    return Cause(f"last line of the log: {_short(last)}" if last else "the log is empty", _SEE_LOG)


def _short(text: str, width: int = 400) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
