"""The flags, and the command line that a recipe becomes, by OpenRLHF's own parser."""

import copy

import pytest
import yaml
from harness import _parser

from kl_plugins.launch.recipes import list_recipes, recipes_dir
from kl_plugins.openrlhf import command, flags, hook


@pytest.fixture
def parser(monkeypatch):
    monkeypatch.delenv(hook.CONFIG, raising=False)
    parser = copy.copy(_parser())
    parser.error = command._refuse
    return parser


def words(settings, overrides=(), steps=None):
    """`native_command` in this process, which has OpenRLHF imported already."""
    result = command.answer(command.request(settings, overrides, steps))
    if "error" in result:
        raise ValueError(result["error"])
    return result["words"]


def parse(parser, *words):
    return vars(flags.parse(parser, ["--algo.advantage.estimator", "group_norm", *words]))


def test_without_our_flags_nothing_is_ours(parser):
    values = parse(parser, "--algo.kl.use_loss", "--algo.kl.estimator", "k3")
    assert not [dest for dest in values if dest.startswith(flags.PLUGIN)]
    assert (values[flags.ESTIMATOR], values[flags.USE_LOSS]) == ("k3", True)
    assert parse(parser)[flags.ESTIMATOR] == "k1"


def test_old_spellings(parser):
    values = parse(parser, "--kl_estimator", "k2", "--use_kl_loss", "--init_kl_coef", "0.3", "--kl-clip-low", "0.1")
    assert values["algo.kl.plugin.estimator"] == values[flags.ESTIMATOR] == "k2"
    assert values["algo.kl.init_coef"] == 0.3
    assert values["algo.kl.plugin.clip_low"] == 0.1
    assert values[flags.USE_LOSS] is True


def test_the_schedule_travels_with_the_rest(parser):
    typed = ["--kl_controller.kind", "log", "--kl_controller.target", "0.1", "--kl_reference.reset_every", "50"]
    values = parse(parser, *typed, "--kl_reference.reset_optimizer")
    assert values["algo.kl.plugin.estimator"] == "k2"
    assert values["algo.kl.plugin.controller.kind"] == "log"
    assert values["algo.kl.plugin.controller.target"] == 0.1
    assert values["algo.kl.plugin.reference.reset_every"] == 50
    assert values["algo.kl.plugin.reference.reset_optimizer"] is True
    block = {"controller": {"kind": "log", "target": 0.1}, "reference": {"reset_every": 50, "reset_optimizer": True}}
    assert words({"kl": block}) == [*typed, "--kl_reference.reset_optimizer", "true"]
    with pytest.raises(ValueError, match="kl.controller.taget: no such flag of OpenRLHF: did you mean kl.controller.t"):
        words({"kl": {"controller": {"taget": 0.1}}})
    with pytest.raises(ValueError, match=r"kl.controller.target=None must be > 0"):
        parse(parser, "--kl_controller.kind", "ziegler")


def test_placement_decides(parser):
    values = parse(parser, "--kl_correction", "clip")
    assert (values["algo.kl.plugin.estimator"], values[flags.USE_LOSS]) == ("k2", True)
    values = parse(parser, "--kl_placement", "reward")
    assert (values["algo.kl.plugin.estimator"], values[flags.USE_LOSS]) == ("k1", False)
    values = parse(parser, "--kl_correction", "clip", "--algo.kl.estimator", "k3")
    assert values["algo.kl.plugin.estimator"] == "k3"
    values = parse(parser, "--kl_estimator", "k1", "--kl_allow_vacuous", "--kl_check_finite", "false")
    assert (values["algo.kl.plugin.allow_vacuous"], values["algo.kl.plugin.check_finite"]) == (True, False)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kl_placement", "reward", "--use_kl_loss"], "KL in both is refused"),
        (["--kl_estimator", "k2", "--algo.kl.estimator", "k3"], "differ: give one"),
        (["--kl_estimator", "k1"], "pure noise"),
        (["--kl_estimator", "k4"], "Registered: k1, k2, k3"),
        (["--kl_estimator", "k2", "--algo.kl.unbiased_gradient"], "unbiased_gradient replaces"),
        (["--kl_estimator", "k2", "--init_kl_coef", "0"], "starts no reference model"),
        (["--kl_estimatr", "k2"], "did you mean --kl_estimator"),
        (["--kl_correction", "clipp"], "invalid choice: 'clipp'"),
        (["--algo.advantage.std_min", "0.1", "--algo.advantage.estimator", "gae"], "choose group_norm"),
    ],
)
def test_refused(parser, words, says):
    with pytest.raises(ValueError, match=says):
        parse(parser, *words)


def test_one_source_of_configuration(parser, monkeypatch):
    monkeypatch.setenv(hook.CONFIG, '{"estimator": "k2"}')
    with pytest.raises(ValueError, match="use one of the two"):
        parse(parser, "--kl_estimator", "k2")


def test_help_shows_both(parser):
    text = parser.format_help()
    assert "--kl_estimator NAME" in text
    assert "--vllm.num_engines" in text


def test_native_command(monkeypatch):
    monkeypatch.setenv("WHERE", "/data")
    settings = {
        "kl": {"estimator": "k2", "correction": "clip", "report": None},
        "actor": {"model_name_or_path": "${oc.env:WHERE}/m", "adam": {"betas": [0.9, 0.95]}},
        "algo": {"advantage": {"estimator": "group_norm"}, "kl": {"init_coef": 0.1}},
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 2},
        "reward": {"remote_url": "pkg://kl_plugins.cpu.addition"},
        "ds": {"packing_samples": False},
        "vllm": {"enforce_eager": True},
    }
    line = command.native_command(settings, ["kl.credit=return", "--actor.adam.lr", "3e-4"], steps=3)
    assert line[:5] == ["kl-openrlhf", "--kl_estimator", "k2", "--kl_correction", "clip"]
    text = " ".join(line)
    for part in (
        "--actor.model_name_or_path /data/m",
        "--actor.adam.betas 0.9 0.95",
        "kl_plugins/cpu/addition.py",
        "--vllm.enforce_eager",
        "--kl_credit return",
        "--data.max_samples 12",
        "--train.num_episodes 1",
    ):
        assert part in text
    assert "packing" not in text
    assert "report" not in text
    assert line[-2:] == ["--actor.adam.lr", "3e-4"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"actor.kl_estimator": "k2"}, "actor.kl_estimator: no such flag of OpenRLHF: did you mean kl.estimator"),
        ({"actor": {"adam": {"lrr": 1}}}, "actor.adam.lrr: .* did you mean actor.adam.lr"),
        ({"vllm": {"enforce_eager": "yes"}}, "is a switch, true or false"),
        ({"actor": {"adam": {"lr": "fast"}}}, "invalid float value: 'fast'"),
        ({"data": {"prompt_dataset": "???"}}, "add data.prompt_dataset="),
        ({"data": {"prompt_dataset": "${oc.env:NOWHERE}"}}, "NOWHERE is not set"),
        ({"reward": {"remote_url": "pkg://nowhere_at_all"}}, "no such Python module"),
    ],
)
def test_recipe_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        words(settings)


def test_native_command_refuses_too():
    with pytest.raises(ValueError, match="did you mean kl.estimator"):
        command.native_command({"actor.kl_estimator": "k2"})


@pytest.mark.parametrize("profile", ["cpu", "node"])
@pytest.mark.parametrize("recipe", [r.path for r in list_recipes() if r.framework == "openrlhf"], ids=lambda p: p.stem)
def test_every_recipe_with_every_profile(recipe, profile, monkeypatch):
    monkeypatch.setenv("KL_PLUGINS_CPU_DATA", "/data")
    overlay = recipes_dir() / "openrlhf" / "profile" / f"{profile}.yaml"
    settings = command.merge(*(yaml.safe_load(path.read_text()) for path in (recipe, overlay)))
    given = [] if profile == "cpu" else ["data.prompt_dataset=p.jsonl", "reward.remote_url=r.py"]
    line = words(settings, given)
    assert line[line.index("--kl_estimator") + 1] == settings["kl"]["estimator"]
