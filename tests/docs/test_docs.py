"""The documentation's numbers: each console block is run, and what it shows must be in what comes out, in order."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kl_plugins.audit import frameworks, judge
from kl_plugins.cli import app

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```console ?(\w*)\n\$ kl-plugins ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks():
    for file in sorted(DOCS.glob("*.md")):
        for needs, command, shown in BLOCK.findall(file.read_text()):
            yield pytest.param(needs, command, shown.splitlines(), id=f"{file.stem}: {command[:60]}")


@pytest.mark.parametrize(("needs", "command", "shown"), list(blocks()))
def test_console_block(needs, command, shown, tmp_path, monkeypatch):
    if needs in ("verl", "openrlhf") and frameworks.version(needs) is None:
        pytest.skip(f"{needs} is not installed in this environment")
    if needs == "bounded":
        code = re.search(r"```python\n(.*?)```", (DOCS / "estimators.md").read_text(), re.DOTALL)[1]
        (tmp_path / "bounded.py").write_text(code)
        monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "bounded")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    words = [" ".join(line.split()) for line in result.output.splitlines()]
    position = 0
    for line in shown:
        line = " ".join(line.split())
        # A framework that is installed adds columns on the right.
        found = [i for i in range(position, len(words)) if words[i].startswith(line)]
        assert found, f"{line!r} is not in what follows of:\n{result.output}"
        position = found[0] + 1


def test_blocks_are_found():
    text = "".join(file.read_text() for file in DOCS.glob("*.md"))
    assert len(list(blocks())) == text.count("```console") > 5


def rows():
    table = (DOCS / "frameworks.md").read_text().split("## As loss")[1].split("##")[0]
    for line in table.splitlines():
        if line.startswith(("| verl", "| OpenRLHF")):
            setting, descends, weight, zero = (cell.strip() for cell in line.strip("|").split("|"))
            framework = setting.split()[0].lower()
            names = re.findall(r"`([^`]+)`", setting)
            if "any" in setting:
                names = [f"{k} unbiased_gradient" for k in ("k1", "k2", "k3")]
            for name in names:
                yield pytest.param(framework, name, descends, weight, zero, id=f"{framework} {name}")


@pytest.mark.parametrize(("framework", "name", "descends", "weight", "zero"), list(rows()))
def test_table_of_own_losses(framework, name, descends, weight, zero):
    if frameworks.version(framework) is None:
        pytest.skip(f"{framework} is not installed in this environment")
    loss = frameworks.own_loss(framework, name)
    words = {"nothing": "nothing", "reverse": "reverse KL", "forward": "forward KL", "other": "no KL"}
    assert descends.startswith(words[judge.descends(loss)])
    assert (weight != "no") == judge.weighted(loss)
    zones = judge.dead_zones(loss)
    edges = re.findall(r"[<>] ([−\d.]+)", zero)
    assert [f"{edge:.2f}".replace("-", "−") for zone in zones for edge in zone if abs(edge) < 1e9] == edges
    if weight != "no":  # capped at 10, unclipped
        import torch

        at = [float(judge.coefficients(loss, torch.tensor([1.0]), rho)) for rho in (1.0, 5.0, 100.0)]
        assert at == pytest.approx([1, 5, 10], rel=1e-4)
