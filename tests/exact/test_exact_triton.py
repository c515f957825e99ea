"""The Triton step in Triton's interpreter, on the CPU; and compiled, not run, for a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
HERE = Path(__file__).parent


def test_in_the_interpreter():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton_cases.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-2000:]


def test_compiles_for_a_gpu():
    """No GPU is needed to compile; what the interpreter accepts the compiler may not."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from kl_plugins import exact_triton

    for kernel in (exact_triton._statistics, exact_triton._gradient):
        types = dict.fromkeys(("rows", "vocabulary"), "i32") | dict.fromkeys(("z_stride", "r_stride"), "i64")
        types |= dict.fromkeys(("DIRECTION", "BLOCK"), "constexpr")
        signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
        for direction in range(3):
            source = ASTSource(kernel, signature, constexprs={"DIRECTION": direction, "BLOCK": exact_triton.BLOCK})
            assert compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
