"""`kl-plugins patch apply|check|revert --target DIR`: the plugin as a change to OpenRLHF's source.

For those who vendor OpenRLHF; the runtime way (`kl-openrlhf`) stays the recommended one. Every line of context has to
be there exactly, and the files that result have to be those that were tested: else nothing is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ADVICE = "the runtime way, kl-openrlhf, changes no file"


class PatchError(RuntimeError):
    """The target is not what the patch was made for."""


@dataclass(frozen=True)
class Patch:
    """One folder of ``patches/``: a unified diff, and the sha256 of each file before and after it."""

    name: str
    diff: str
    hashes: dict[str, dict[str, str]]


def apply(target: str | Path) -> str:
    """Patch the OpenRLHF in ``target``; returns a sentence on what was done.

    Args:
        target: the folder that holds the package ``openrlhf``: a source tree, or site-packages.

    Raises:
        PatchError: it is not a version there is a patch for, or its files were changed.
    """
    return _change(Path(target), "before", "after", "patched")


def revert(target: str | Path) -> str:
    """Undo `apply`, byte for byte; returns a sentence on what was done.

    Raises:
        PatchError: the files are not those that `apply` left.
    """
    return _change(Path(target), "after", "before", "as released")


def check(target: str | Path) -> str:
    """Say which state the OpenRLHF in ``target`` is in.

    Raises:
        PatchError: neither as released nor patched.
    """
    target = Path(target)
    patch, state = _find(target)
    words = {"before": "as released, not patched", "after": "patched"}
    return f"{target}: {patch.name}, {words[state]}"


def _change(target: Path, start: str, end: str, words: str) -> str:
    patch, state = _find(target)
    if state == end:
        return f"{target}: {patch.name} is {words} already, nothing done"
    results = {}
    for name, hunks in _hunks(patch.diff):
        if start == "after":
            hunks = [(at + _shift(hunks, at), new, old) for at, old, new in hunks]
        text = _replace((target / name).read_text(), hunks, name)
        if _hash(text) != patch.hashes[name][end]:
            raise PatchError(f"{target / name}: the result is not the tested one; nothing was written, {ADVICE}")
        results[name] = text
    for name, text in results.items():
        _write(target / name, text)
    return f"{target}: {patch.name} is now {words} ({', '.join(results)})"


def _find(target: Path) -> tuple[Patch, str]:
    """The patch whose files these are, and the state they are in: "before" or "after"."""
    if not (target / "openrlhf" / "__init__.py").is_file():
        raise PatchError(f"{target} holds no package openrlhf: give the folder that contains openrlhf/")
    found = []
    for patch in _patches():
        states = {}
        for name, hashes in patch.hashes.items():
            path = target / name
            now = _hash(path.read_text()) if path.is_file() else ""
            states[name] = next((state for state in ("before", "after") if hashes[state] == now), "unknown")
        if set(states.values()) in ({"before"}, {"after"}):
            return patch, next(iter(states.values()))
        found.append(f"{patch.name}: {', '.join(f'{name} is {state}' for name, state in states.items())}")
    raise PatchError(
        f"{target} holds OpenRLHF {_version(target)}, neither as released nor patched ({'; '.join(found)}). Restore "
        f"the files, or install a version there is a patch for; {ADVICE}"
    )


def _version(target: Path) -> str:
    """What the target says of its version, for a message: a source tree's version.txt, or the installed metadata."""
    file = target / "version.txt"
    if file.is_file():
        return file.read_text().strip()
    installed = sorted(target.glob("openrlhf-*.dist-info"))
    return installed[-1].name.split("-")[1] if installed else "of an unknown version"


def _patches() -> list[Patch]:
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "patches", package.parent / "patches"):
        if folder.is_dir():
            break
    else:
        raise PatchError(f"no patches in {package} or beside it: reinstall kl-plugins")
    return [
        Patch(
            f"OpenRLHF {path.name.partition('-')[2]}",
            (path / "kl_plugins.patch").read_text(),
            json.loads((path / "files.json").read_text()),
        )
        for path in sorted(folder.glob("openrlhf-*"), reverse=True)
    ]


Hunk = tuple[int, list[str], list[str]]


def _hunks(diff: str) -> Iterator[tuple[str, list[Hunk]]]:
    """Each file of a unified diff with its hunks: first line in the old file (from 0), old lines, new lines."""
    for part in re.split(r"^--- a/", diff, flags=re.MULTILINE)[1:]:
        name, _, body = part.partition("\n")
        hunks = []
        for piece in re.split(r"^@@ ", body, flags=re.MULTILINE)[1:]:
            header, _, text = piece.partition("\n")
            lines = text.splitlines()
            old = [line[1:] for line in lines if line[:1] in (" ", "-", "")]
            new = [line[1:] for line in lines if line[:1] in (" ", "+", "")]
            hunks.append((int(re.match(r"-(\d+)", header)[1]) - 1, old, new))
        yield name, hunks


def _shift(hunks: list[Hunk], start: int) -> int:
    """How far the hunks before ``start`` move what comes after them."""
    return sum(len(new) - len(old) for at, old, new in hunks if at < start)


def _replace(text: str, hunks: list[Hunk], name: str) -> str:
    lines = text.splitlines()
    for start, old, new in reversed(hunks):
        if lines[start : start + len(old)] != old:
            raise PatchError(f"{name}, line {start + 1}: not the text that the patch changes; nothing was written")
        lines[start : start + len(old)] = new
    return "\n".join(lines) + "\n"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    """Replace a file in one step: an interruption leaves either text whole, and a hard link elsewhere as it was."""
    mode = path.stat().st_mode
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, mode)
    os.replace(file.name, path)
