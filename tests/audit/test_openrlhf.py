"""OpenRLHF's own KL and flags, as installed."""

import json
import math
import subprocess
import sys

import pytest

from kl_plugins.audit import frameworks, judge
from kl_plugins.audit.read import read
from kl_plugins.launch.recipes import list_recipes

if frameworks.version("openrlhf") is None:
    pytest.skip("OpenRLHF is not installed in this environment", allow_module_level=True)

USUAL = "--algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3"
ONE_UPDATE = "--rollout.batch_size 128"


def audited(kl_plugins, words, expect=0):
    return json.loads(kl_plugins(f"audit --json {words}", expect=expect))


def codes(data, severity):
    return {f["code"] for f in data["findings"] if f["severity"] == severity}


def test_the_usual_grpo(kl_plugins):
    data = audited(kl_plugins, f"-- {USUAL}")
    (part,) = data["parts"]
    assert part["descends"] == "forward"
    assert part["importance_weight"] is False
    assert part["beta"] == 0.01  # the parser's own default
    (_, dead_below), (dead_above, _) = part["zero_gradient"]
    for edge in (dead_below, dead_above):
        assert math.exp(-edge) - 1 + edge == pytest.approx(10, abs=1e-3)
    assert codes(data, "wrong") == {"objective", "off_policy"}
    assert data["updates"] == 8
    text = " ".join(kl_plugins(f"audit --strict -- {USUAL}", expect=1).split())
    for said in (
        "OpenRLHF's own KL, --algo.kl.estimator k3, as loss descends forward KL",
        "without importance weight",
        "exactly 0 where log(pi/pi_ref) < -2.61",
        "8 updates a batch without importance weight",
        "The gradient is NOT the one named.",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("name", "objective", "weight", "edges"),
    [
        ("k1", "nothing", False, 10),
        ("k2", "reverse", False, math.sqrt(20)),
        ("k3", "forward", False, None),
        ("k1 unbiased_gradient", "reverse", True, None),
        ("k3 unbiased_gradient", "reverse", True, None),
    ],
)
def test_own_settings(name, objective, weight, edges):
    loss = frameworks.own_loss("openrlhf", name)
    assert judge.descends(loss) == objective
    assert judge.weighted(loss) == weight
    zones = judge.dead_zones(loss)
    if weight:
        assert zones == []
    if edges:
        (_, below), (above, _) = zones
        assert (below, above) == (pytest.approx(-edges, abs=1e-4), pytest.approx(edges, abs=1e-4))


@pytest.mark.parametrize("recipe", [r.name for r in list_recipes() if r.framework == "openrlhf"])
def test_shipped_recipes_descend_what_they_say(recipe):
    setting = read(recipe)
    (part,) = setting.parts
    assert part.config is not None
    named = {"k1": "reverse", "k2": "reverse", "k3": "forward"}[part.config.estimator]
    loss = setting.loss(part)
    assert judge.descends(loss) == named
    if part.place == "loss":
        assert judge.weighted(loss) == (part.config.correction != "none")


@pytest.mark.parametrize("recipe", ["openrlhf/grpo_k2", "openrlhf/grpo_k3", "openrlhf/ppo_k1_in_reward"])
def test_shipped_recipes_pass_strict(kl_plugins, recipe):
    assert audited(kl_plugins, f"--strict {recipe}")["gradient_is_the_one_named"] is True


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (f"--algo.kl.use_loss {ONE_UPDATE}", {"vacuous"}),  # k1 is the default
        (f"{USUAL} {ONE_UPDATE}", {"objective"}),
        ("--algo.kl.use_loss --algo.kl.estimator k2", {"off_policy"}),
        ("--algo.kl.estimator k3", {"reward_estimator"}),
        ("--algo.kl.estimator k2", {"reward_estimator"}),
        (f"--algo.kl.use_loss --algo.kl.estimator k2 {ONE_UPDATE} --rollout.temperature 0", {"temperature"}),
    ],
)
def test_misconfigurations(kl_plugins, words, wrong):
    data = audited(kl_plugins, f"--strict -- {words}", expect=1)
    assert codes(data, "wrong") == wrong


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        ("--algo.kl.use_loss --algo.kl.init_coef 0", "no_kl"),
        ("--algo.kl.target 0", "controller"),
        ("--algo.kl.unbiased_gradient", "ignored_flag"),
        ("--algo.kl.use_loss --algo.kl.estimator k2", "clamp"),
        ("--algo.kl.use_loss --algo.kl.estimator k2 --actor.loss_agg_mode seq-mean-token-mean", "aggregation"),
        ("--rollout.top_p 0.9", "sampler"),
        ("--algo.advantage.lambd 0.95", "credit"),
    ],
)
def test_warnings(kl_plugins, words, warning):
    assert warning in codes(audited(kl_plugins, f"-- {words}"), "warning")


@pytest.mark.parametrize(
    "words",
    [
        "--algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.unbiased_gradient",
        f"--algo.kl.use_loss --algo.kl.estimator k2 {ONE_UPDATE}",
        "python3 -m openrlhf.cli.train_ppo_ray --algo.kl.estimator k1",
        "kl-openrlhf --kl_estimator k2 --kl_correction clip",
    ],
)
def test_reverse_kl_passes(kl_plugins, words):
    assert audited(kl_plugins, f"--strict -- {words}")["parts"][0]["descends"] == "reverse"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-- --algo.kl.estimater k2", "did you mean --algo.kl.estimator"),  # case 27
        ("-- --algo.kl.estimator k4", "invalid choice: 'k4'"),
        ("-- --kl_estimator k1", "pure noise (10)"),
        ("-- --kl_placement reward --algo.kl.use_loss", "KL in two places"),
        ("-- --kl_estimator k2 --algo.kl.unbiased_gradient", "replaces the gradient"),
        ("openrlhf/grpo_k2 algo.kl.init_cof=0.2", "did you mean algo.kl.init_coef"),
        ("openrlhf/grpo_k2 kl.estimater=k3", "did you mean kl.estimator"),
        ("verl/grpo_k2", "verl is not installed"),
    ],
)
def test_refusals(kl_plugins, words, said):
    if "verl is not installed" in said and frameworks.version("verl"):
        pytest.skip("verl is installed here")
    assert said in " ".join(kl_plugins(f"audit {words}", expect=2).split())


def test_effective_beta(kl_plugins):
    def beta(words):
        data = audited(kl_plugins, f"-- {words}")
        return next(f["text"] for f in data["findings"] if f["code"] == "beta")

    assert "effective beta is beta/std" in beta("--algo.kl.estimator k1")  # gae whitens what it sums
    assert "but not the KL" in beta("--algo.kl.estimator k1 --algo.advantage.estimator group_norm")
    assert "divides by no standard deviation" in beta("--algo.kl.estimator k1 --algo.advantage.estimator rloo")


REAL = """
import json, sys
from kl_plugins.cpu import OPENRLHF_ENV
import os
os.environ.update(OPENRLHF_ENV)
from kl_plugins.cpu import openrlhf as cpu
cpu.install()
from kl_plugins.openrlhf.command import openrlhf_parser
parser = openrlhf_parser()
"""
DUMP = """
rows = {}
for action in parser._actions:
    if action.dest != "help":
        rows[action.dest + " " + " ".join(action.option_strings)] = [
            action.nargs, action.default, action.const, getattr(action.type, "__name__", None),
            list(action.choices) if action.choices else None, type(action).__name__]
out.write(json.dumps(rows, default=str))
"""


def test_rebuilt_parser_is_openrlhfs(tmp_path):
    """Flag by flag against the parser that its script builds when it is run."""
    from kl_plugins.audit.read_openrlhf import rebuilt_parser
    from kl_plugins.openrlhf import flags

    script = f"{REAL}\nout = open(sys.argv[1], 'w')\n{DUMP}"
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "real.json")], check=True, timeout=300)
    real = json.loads((tmp_path / "real.json").read_text())
    parser = rebuilt_parser()
    flags.add(parser)
    with open(tmp_path / "ours.json", "w") as out:
        exec(DUMP, {"parser": parser, "out": out, "json": json})
    ours = json.loads((tmp_path / "ours.json").read_text())
    assert ours.keys() == real.keys()
    computed = {name for name, row in ours.items() if row[1] is None and real[name][1] is not None}
    assert len(computed) <= 6, computed  # a default that is an expression is not ours to evaluate
    for name in real.keys() - computed:
        assert ours[name] == real[name], name
