"""`python -m benchmarks` runs here and says what it measured. No time is judged."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*words):
    command = [sys.executable, "-m", "benchmarks", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_documented_names_are_known():
    known = set(re.search(r"of ([\w, ]+); default", " ".join(run("--help").stdout.split()))[1].split(", "))
    documented = re.findall(r"python -m benchmarks((?: [a-z]+)+)", (ROOT / "docs" / "performance.md").read_text())
    documented += re.findall(r"-m benchmarks((?: [a-z]+)+)", (ROOT / "Makefile").read_text())
    assert documented
    assert {name for names in documented for name in names.split()} <= known == {"head", "linear", "step", "exact"}


def test_unknown_name():
    result = run("tail")
    assert result.returncode == 2
    assert "no benchmark tail: choose from head, linear, step, exact" in result.stderr


@pytest.mark.timeout(900)
def test_head_and_step(tmp_path):
    result = run("head", "step", "--repeats", "1", "--json", str(tmp_path / "out.json"))
    assert result.returncode == 0, result.stderr[-3000:]
    document = json.loads((tmp_path / "out.json").read_text())
    assert {"processor", "threads", "clock", "python", "torch", "kl-plugins"} == set(document["machine"])
    operations = " ".join(r["operation"] for r in document["results"])
    for package in ("verl", "openrlhf"):
        present = importlib.util.find_spec(package) is not None
        assert (f"head, {package} " in operations) == present
        assert (f"step, {package} " in operations) == present
    assert all(r["milliseconds"] > 0 and r["ratio"] > 0 for r in document["results"])
    for r in document["results"]:
        assert f"| {r['operation']} | {r['name']} |" in result.stdout
