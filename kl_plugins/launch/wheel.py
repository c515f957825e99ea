"""The package as an unpacked wheel for a Ray job's runtime env: one folder of code, one of metadata.

Entry points are found only where the metadata is on the path too, so that the code's folder alone would not do. Nor
does a wheel file: Ray installs it on every node with ``pip install --target``, which needs a pip there, fetches what
the metadata asks for (a torch of its own, for one), and fails where two nodes of one machine share Ray's folder: the
second takes the first one's installation for the wheel, and removes it under running workers (Ray 2.55 to 2.60,
``_private/runtime_env/py_modules.py``). Folders are zipped by Ray and unpacked under a lock.

Packed from the files that are imported here, installed or editable, without pip, network or a build.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import kl_plugins
from kl_plugins.launch.plan import LaunchError
from kl_plugins.launch.recipes import OWN, Recipe, recipes_dir

LIMIT = 4 << 20  # bytes of recipes that travel


def build(folder: Path, own: Recipe | None = None) -> list[Path]:
    """The two folders, below `folder`, in one that is named by their content; they are written once.

    Args:
        folder: where they are kept.
        own: a recipe of the user's to take along, as ``own/<framework>/<file>``.

    Raises:
        LaunchError: the package has no metadata here, or `own` lies among too much YAML.
    """
    info = f"kl_plugins-{kl_plugins.__version__}.dist-info"
    files = {name: path.read_bytes() for name, path in _files(own)}
    files |= {f"{info}/{name}": text.encode() for name, text in _metadata().items()}
    # The metadata vouches for itself: its folder will stand apart from the code's.
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*_metadata(), "RECORD"]).encode()
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    target = folder / digest.hexdigest()[:16]
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=folder))
        for name, content in files.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_bytes(content)
        try:
            draft.rename(target)
        except OSError:  # another submission was faster
            shutil.rmtree(draft)
    return [target / "kl_plugins", target / info]


def _files(own: Recipe | None) -> Iterator[tuple[str, Path]]:
    package = Path(kl_plugins.__file__).resolve().parent
    beside = recipes_dir().parent  # recipes and patches: in the package, or beside it in a checkout
    for name, folder in (("", package), ("recipes/", beside / "recipes"), ("patches/", beside / "patches")):
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield f"kl_plugins/{name}{path.relative_to(folder).as_posix()}", path
    if own is None:
        return
    # What a recipe can be made of: YAML beside it, and in the folders beneath (Hydra's groups, profiles).
    parts = [*own.path.parent.glob("*.y*ml"), *own.path.parent.glob("*/*.y*ml")]
    if sum(path.stat().st_size for path in parts) > LIMIT:
        raise LaunchError(f"{own.path}: more than {LIMIT >> 20} MiB of YAML beside it; give the recipe its own folder")
    for path in parts:
        yield f"kl_plugins/recipes/{OWN}/{own.framework}/{path.relative_to(own.path.parent).as_posix()}", path


def _metadata() -> dict[str, str]:
    try:
        here = importlib.metadata.distribution("kl-plugins")
    except importlib.metadata.PackageNotFoundError as error:
        raise LaunchError("kl_plugins is importable here but not installed: pip install it, then submit") from error
    texts = {name: here.read_text(name) for name in ("METADATA", "entry_points.txt")}
    if not all(texts.values()):
        raise LaunchError(f"the metadata of kl-plugins {here.version} is incomplete here: pip install it again")
    return texts
