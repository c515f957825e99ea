"""The package as a wheel for a Ray job's runtime env: entry points are found in a wheel, not in a plain directory.

Packed from the files that are imported here, installed or editable, without pip, network or a build. Ray runs
``pip install WHEEL --target=…`` on every node, without ``--no-deps``: the wheel names no dependencies, or each node
would fetch a torch of its own. They have to be there, and the preflight looks.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import zipfile
from collections.abc import Iterator
from pathlib import Path

import kl_plugins
from kl_plugins.launch.plan import LaunchError
from kl_plugins.launch.recipes import OWN, Recipe, recipes_dir

LIMIT = 4 << 20  # bytes of recipes that travel


def build(folder: Path, own: Recipe | None = None) -> Path:
    """The wheel, written into `folder`; with the user's recipe `own` in it, under the name ``own/<framework>/<stem>``.

    Ray keeps wheels by their file name, so that the name has to change with the content: a build tag of its hash.

    Raises:
        LaunchError: the package has no metadata here, or `own` lies among too much YAML.
    """
    files = {name: path.read_bytes() for name, path in _files(own)}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    version, tag = kl_plugins.__version__, f"0{digest.hexdigest()[:16]}"
    info = f"kl_plugins-{version}.dist-info"
    files |= {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: kl-plugins\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: kl-plugins\nRoot-Is-Purelib: true\nBuild: {tag}\n"
        "Tag: py3-none-any\n".encode(),
        f"{info}/entry_points.txt": _entry_points().encode(),
    }
    record = "".join(f"{name},sha256={_hash(content)},{len(content)}\n" for name, content in sorted(files.items()))
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"kl_plugins-{version}-{tag}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return wheel


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


def _entry_points() -> str:
    try:
        text = importlib.metadata.distribution("kl-plugins").read_text("entry_points.txt")
    except importlib.metadata.PackageNotFoundError:
        text = None
    if not text:
        raise LaunchError("kl_plugins is importable here but not installed: pip install it, then submit again")
    return text


def _hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
