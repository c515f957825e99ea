"""What `import kl_plugins` loads, where it is loaded from, and what it costs."""

import subprocess
import sys
from pathlib import Path

import kl_plugins

HEAVY = ("verl", "openrlhf", "ray", "vllm", "typer", "rich", "matplotlib", "yaml", "omegaconf")


def loaded_after(statement):
    code = f"import sys; {statement}; print(*sorted({{m.partition('.')[0] for m in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_tests_run_against_the_installed_package():
    """CI installs the wheel; an editable install is a developer's own choice, made visible by the marker file."""
    folder = Path(kl_plugins.__file__).parent
    assert "site-packages" in folder.parts or (folder.parent / "pyproject.toml").exists()
    assert (folder / "py.typed").exists()


def test_core_needs_torch_alone():
    core = loaded_after("from kl_plugins import KLConfig, kl_head, kl_metrics, combined_advantages; KLConfig()")
    assert "torch" in core
    assert not core & set(HEAVY) - loaded_after("import torch")


def test_package_itself_imports_not_even_torch():
    assert not loaded_after("import kl_plugins") & {"torch", *HEAVY}


def test_cost_over_torch_in_modules():
    """Speed is benchmarked elsewhere; what makes an import slow is what it loads: our own handful of modules."""
    extra = loaded_after("import torch, kl_plugins; from kl_plugins import *") - loaded_after("import torch")
    assert extra == {"kl_plugins"}


def test_unknown_name():
    assert not hasattr(kl_plugins, "kl_heads")
    assert set(kl_plugins.__all__) <= set(dir(kl_plugins))
    for name in kl_plugins.__all__:
        assert getattr(kl_plugins, name) is not None
