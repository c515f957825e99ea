"""What happens when a framework's function is not the known one; the functions here are this file's own."""

import subprocess
import sys

import pytest

from kl_plugins import drift
from kl_plugins.drift import DriftError, Wrapped, check


def mean(x, *, weights=None):
    return sum(x) / len(x)


class Trainer:
    def step(self, batch, scale: float = 1.0) -> float:
        return scale * len(batch)


def known(name=f"{__name__}:mean", **changes):
    function = drift.resolve(name)
    entry = dict(
        name=name,
        signature=drift.signature(function),
        returns="the mean",
        sources={"1.0": drift.source_hash(function)},
    )
    return Wrapped(**{**entry, **changes})


@pytest.fixture(autouse=True)
def switched_off(monkeypatch):
    monkeypatch.delenv(drift.SWITCH, raising=False)


def test_known_functions_pass():
    method = known(f"{__name__}:Trainer.step")
    assert method.signature == "self, batch, scale=1.0"
    check("framework", "1.0", [known(), method])


@pytest.mark.parametrize(
    ("version", "changes", "says"),
    [
        ("2.0", {}, "version that kl_plugins was not tested against"),
        ("1.0", {"sources": {"1.0": "0" * 64}}, "has another body"),
        ("1.0", {"signature": "x"}, r"takes \(x, \*, weights=None\), not \(x\)"),
    ],
)
def test_unknown_is_refused_unless_switched_on(monkeypatch, caplog, version, changes, says):
    entry = known(**changes)
    with pytest.raises(DriftError, match=says) as refusal:
        check("framework", version, [entry])
    for part in (f"framework {version}", entry.name, drift.SWITCH, "Known: 1.0"):
        assert part in str(refusal.value)
    monkeypatch.setenv(drift.SWITCH, "1")
    check("framework", version, [entry])
    assert entry.name in caplog.text


def test_a_missing_function_and_a_failing_probe_are_never_allowed(monkeypatch):
    monkeypatch.setenv(drift.SWITCH, "1")
    with pytest.raises(DriftError, match=r"has no .*:median"):
        check("framework", "1.0", [known(), Wrapped(f"{__name__}:median", "x", "the median", {"1.0": ""})])
    good = known(probe=lambda f: None if f([1, 3]) == 2 else "gives no mean")
    check("framework", "1.0", [good])
    with pytest.raises(DriftError, match="gives no mean"):
        check("framework", "1.0", [known(probe=lambda f: None if f([1, 3]) == 3 else "gives no mean")])


def test_our_own_wrapper_is_looked_through(monkeypatch):
    import functools

    entry = known()
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "mean", functools.wraps(mean)(lambda *a, **k: 0))
    check("framework", "1.0", [entry])


def test_prints_what_to_declare():
    command = [sys.executable, "-m", "kl_plugins.drift", "kl_plugins.drift:source_hash"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert drift.source_hash(drift.source_hash) in shown
    assert "signature: function" in shown
