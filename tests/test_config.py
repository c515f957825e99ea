"""KLConfig: every axis, every rule, errors that suggest, the YAML round trip."""

import itertools

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kl_plugins import KLConfig
from kl_plugins.config import CHOICES


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"estimator": "k22"}, "did you mean 'k2'"),  # case 27
        ({"report": "kk3"}, "did you mean 'k3'"),
        ({"placement": "rewards"}, "kl.placement='rewards': did you mean 'reward'"),
        ({"form": "both"}, "one of decoupled, combined"),
        ({"correction": "clipped"}, "did you mean 'clip'"),
        ({"credit": "tokens"}, "did you mean 'token'"),
        ({"ratio": "seq"}, "did you mean 'sequence'"),
        ({"clip_low": 1.0}, "kl.clip_low=1.0 must be in"),
        ({"clip_high": -0.1}, "kl.clip_high=-0.1 must be >= 0"),
        ({"ratio_cap": 0.5}, "kl.ratio_cap=0.5 must be >= 1"),
        ({"coefficient_bound": 0.0}, "kl.coefficient_bound=0.0 must be > 0"),
        ({"estimator": "k1"}, "descends nothing.*allow_vacuous"),
        ({"estimator": "k3", "placement": "reward"}, "collapses.*allow_vacuous"),
        ({"estimator": "none", "placement": "reward"}, "regularises nothing"),
        ({"estimator": "k1", "placement": "reward", "report": "k3"}, "kl.report acts on the loss term"),
        ({"estimator": "k1", "placement": "reward", "correction": "is"}, "would not happen"),
        ({"form": "combined", "correction": "is"}, "would not happen"),
        ({"form": "combined", "correction": "clip", "ratio": "sequence"}, "would not happen"),
        ({"correction": "clip", "ratio_cap": 1.1}, "never act"),
    ],
)
def test_refusals_say_what_and_how_to_mend(axes, words):
    with pytest.raises(ValueError, match=words):
        KLConfig(**axes)


@pytest.mark.parametrize(
    "axes", [{"clip_low": "0.2"}, {"ratio_cap": float("nan")}, {"check_finite": "yes"}, {"clip_high": True}]
)
def test_wrong_types(axes):
    with pytest.raises(TypeError, match=f"kl.{next(iter(axes))}="):
        KLConfig(**axes)


def test_opt_in():
    KLConfig(estimator="k1", allow_vacuous=True)
    KLConfig(estimator="k3", placement="reward", allow_vacuous=True)


def test_unknown_key_suggests():
    with pytest.raises(ValueError, match="unknown key kl.estimater: did you mean 'estimator'"):
        KLConfig.from_mapping({"estimater": "k2"})


def every_legal_config():
    for estimator, *cell in itertools.product(["k2", "k3", "mse", "none"], *CHOICES.values()):
        try:
            yield KLConfig(estimator=estimator, **dict(zip(CHOICES, cell, strict=True)))
        except ValueError:
            continue


def test_round_trip_through_yaml():
    configs = list(every_legal_config())
    assert len(configs) > 100
    for config in configs:
        assert KLConfig.from_mapping(yaml.safe_load(yaml.safe_dump(config.to_mapping()))) == config


@given(st.dictionaries(st.text(max_size=12), st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5))))
def test_junk_is_refused_with_an_error_of_ours(mapping):
    try:
        KLConfig.from_mapping(mapping)
    except (ValueError, TypeError) as error:
        assert "kl." in str(error) or "KL estimator" in str(error)


def test_describe_names_the_objective_with_its_equation():
    assert "reverse KL" in KLConfig().describe()
    assert "(12)" in KLConfig().describe()
    assert "not counted" in KLConfig().describe()
    assert "whole responses" in KLConfig(credit="return").describe()
    assert "forward KL" in KLConfig(estimator="k3").describe()
    assert "(70)" in KLConfig(correction="clip").describe()
    assert "(69)" in KLConfig(correction="is").describe()
    assert "(7)" in KLConfig(form="combined").describe()
    assert "(13)" in KLConfig(estimator="k1", placement="reward").describe()
    assert "the gradient of no KL" in KLConfig(estimator="k2", placement="reward").describe()
    assert "k3's" in KLConfig(report="k3").describe()
    assert "nothing" in KLConfig(estimator="k1", allow_vacuous=True).describe()
    for config in every_legal_config():
        assert config.describe().endswith(".")
        assert "\n" not in config.describe()
