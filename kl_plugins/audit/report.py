"""Findings and tables of one audit, as rich text and as plain data.

Equation numbers: https://arxiv.org/abs/2510.01555.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kl_plugins.audit import frameworks, judge
from kl_plugins.audit.frameworks import OWN_NAMES, UNBIASED, Loss, own_loss
from kl_plugins.audit.judge import PROBLEMS, ROUNDING, Row, Spread
from kl_plugins.audit.read import NORMS, NOTE, WARNING, WRONG, Finding, Part, Setting
from kl_plugins.config import KLConfig

SHOWN = {"verl": "verl", "openrlhf": "OpenRLHF"}
OBJECTIVES = {
    "reverse": "reverse KL, KL(pi || pi_ref) (12), (14)",
    "forward": "forward KL, KL(pi_ref || pi) (16), (59)",
    "mse": "half the squared distance of the probabilities (65)",
    "nothing": "nothing: its expected gradient is 0 (10)",
    "other": "no KL: its gradient is that of neither direction",
}
NAMED = {"k2": "reverse", "k3": "forward", "mse": "mse"}
LOG_RATIOS = (-20.0, -10.0, -5.0, -2.0, -0.5, 0.5, 2.0, 5.0, 10.0, 20.0)
STD = 0.5  # of a reward of 0 or 1 that is 1 half the time

ALTERNATIVES = {
    "k1 as loss": KLConfig("k1", allow_vacuous=True),
    "k2 as loss": KLConfig("k2"),
    "k3 as loss": KLConfig("k3"),
    "k2, credit return": KLConfig("k2", credit="return"),
    "k1 in the reward": KLConfig("k1", placement="reward"),
}
OFF_POLICY = {
    "k2 as loss": KLConfig("k2"),
    "k2, correction clip": KLConfig("k2", correction="clip"),
    "k3, correction clip": KLConfig("k3", correction="clip"),
    "k2, is, credit return": KLConfig("k2", correction="is", credit="return"),
    "k2, is, return, sequence": KLConfig("k2", correction="is", credit="return", ratio="sequence"),
    "k1 in the reward": KLConfig("k1", placement="reward"),
}


@dataclass(frozen=True)
class Audit:
    """Everything the report says.

    Attributes:
        setting: what was read.
        installed: framework to version, or None.
        sentences: what each part descends, in words.
        on_policy, off_policy: a `Row` for each loss, the setting's own first.
        tails: coefficient of each loss at `LOG_RATIOS`.
        findings: worst first.
    """

    setting: Setting
    installed: dict[str, str | None]
    sentences: list[str]
    on_policy: dict[str, Row]
    off_policy: dict[str, Row]
    tails: dict[str, list[float]]
    findings: list[Finding]

    @property
    def wrong(self) -> bool:
        """Whether the gradient is not the one named."""
        return any(finding.severity == WRONG for finding in self.findings)


def audit(setting: Setting) -> Audit:
    """Measure `setting`, and what it could have been."""
    installed = {name: frameworks.version(name) for name in SHOWN}
    this = {_label(setting, part): setting.loss(part) for part in setting.parts}
    own = _same_names(setting, installed)
    on_policy, off_policy = (
        {name: judge.measure(loss, off) for name, loss in {**this, **own}.items()} | _ours(setting, off)
        for off in (False, True)
    )
    grid = torch.tensor(LOG_RATIOS)
    tails = {
        name: judge.coefficients(loss, grid).tolist()
        for name, loss in {**this, "k2": judge.plugin_loss(KLConfig("k2")), **own}.items()
    }
    sentences, findings = [], []
    for part in setting.parts:
        label = _label(setting, part)
        descends = judge.descends(this[label])
        sentences.append(_sentence(setting, part, this[label], descends))
        rows = (on_policy[label], off_policy[label], on_policy)
        findings += _about_part(setting, part, this[label], descends, *rows)
    findings += [*_about_setting(setting), *setting.findings]
    order = [WRONG, WARNING, NOTE]
    findings.sort(key=lambda finding: order.index(finding.severity))
    return Audit(setting, installed, sentences, on_policy, off_policy, tails, findings)


# -- what is compared with what --------------------------------------------------------------------------------------


def _label(setting: Setting, part: Part) -> str:
    return "this one" if len(setting.parts) == 1 else f"this one, {part.place}"


def _ours(setting: Setting, off_policy: bool) -> dict[str, Row]:
    """The alternatives but for the setting's own, which has its row already; one of them is quoted in the findings."""
    present = [part.config for part in setting.parts]
    table = OFF_POLICY if off_policy else ALTERNATIVES
    return {
        name: judge.measure(judge.plugin_loss(config, clip=setting.clip), off_policy)
        for name, config in table.items()
        if config not in present or name == "k2, credit return"
    }


def _same_names(setting: Setting, installed: dict[str, str | None]) -> dict[str, Loss]:
    """The installed frameworks' own settings of the estimator's name, as losses."""
    losses = {}
    for framework, version in installed.items():
        if version is None:
            continue
        for part in setting.parts:
            bare = part.name.removesuffix(UNBIASED)
            names = OWN_NAMES[framework]
            chosen = names.get(bare) or next((group for group in names.values() if bare in group), ())
            for name in chosen:
                if name == part.own or (part.place == "reward" and name.endswith((UNBIASED, "+"))):
                    continue  # in the reward only the value counts
                own = own_loss(framework, name)
                label = f"{SHOWN[framework]}'s {name.replace(UNBIASED, ', unbiased')}"
                if part.place == "reward":
                    losses[f"{label} in reward"] = judge.own_in_reward(own, part.credit, setting.clip)
                else:
                    losses[label] = own
    return losses


# -- words -----------------------------------------------------------------------------------------------------------


def _sentence(setting: Setting, part: Part, loss: Loss, descends: str) -> str:
    beta = "" if part.beta is None else f" Beta {part.beta:g}{', ' + part.adaptive if part.adaptive else ''}."
    if part.config is not None:
        text = part.config.describe()
        return f"{text[:1].upper()}{text[1:]}{beta}"
    owner = f"{SHOWN[setting.framework]}'s own KL, {part.key}"
    if part.place == "loss":
        weight = "with the importance weight (69)" if judge.weighted(loss) else "without importance weight"
        return f"{owner}, as loss descends {OBJECTIVES[descends]}, per token, {weight}.{beta}"
    return f"{owner}, in the reward descends {OBJECTIVES[descends]}, {part.credit} credit.{beta}"


def _about_part(
    setting: Setting, part: Part, loss: Loss, descends: str, on: Row, off: Row, table: dict[str, Row]
) -> Iterator[Finding]:
    yield from _objective(setting, part, loss, descends, on)
    if part.beta is not None and part.beta <= 0:
        what = "no KL acts, and the reference model runs for nothing" if part.beta == 0 else "distance is rewarded"
        severity = WARNING if part.beta == 0 else WRONG
        yield Finding(severity, "beta", f"beta is {part.beta:g}: {what}. Switch the KL off, or give a positive beta")
    inside = part.place == "reward" or (part.config is not None and part.config.form == "combined")
    if not inside:
        yield from _off_policy(setting, part, loss, descends, off)
    elif part.place == "reward":
        text = "the penalty is that of the policy that wrote the batch; ratio and clip are the policy loss's own"
        yield Finding(NOTE, "off_policy", f"{text} (off-policy error per token {_range(off.reverse_error)})")
    else:
        combined, decoupled = judge.pull_when_clipped(part.config, setting.clip)
        yield Finding(
            WARNING,
            "combined",
            "the KL shares the policy loss's clip: a token with advantage 1 and beta c = 0.5 whose ratio reached "
            f"{1.3 + setting.clip[1]:g} gets {combined:g} from the KL, beside the policy loss it would get "
            f"{decoupled:g}. kl.form=decoupled keeps pulling",
        )
    yield from _tails(part, loss)
    if part.place == "loss" and part.credit == "token" and descends != "nothing":
        exact = table["k2, credit return"]
        yield Finding(
            NOTE,
            "credit",
            "token credit leaves out what a token does to later tokens' KL: on three-token responses its gradient is "
            f"{_range(on.response_error)} away from the response's reverse KL (k2 with credit return: "
            f"{_range(exact.response_error)}), at noise {on.response_noise.median:.1f} "
            f"({exact.response_noise.median:.1f})",
        )
    yield from _effective_beta(setting, part)


def _objective(setting: Setting, part: Part, loss: Loss, descends: str, on: Row) -> Iterator[Finding]:
    if part.beta == 0 or part.name == "none":
        return
    where = "in the reward" if part.place == "reward" else "as loss"
    if part.place == "reward" and judge.pushes_away(loss):
        yield Finding(
            WRONG,
            "reward_estimator",
            f"{part.name} {where} is never negative: a token that the policy already gives too little is pushed down "
            f"further, and the gradient is that of no KL (cosine to reverse KL {_cosine(on.reverse_cosine)}). "
            "Use k1 in the reward, or k2 as loss",
        )
        return
    if descends == "nothing":
        yield Finding(
            WRONG,
            "vacuous",
            f"{part.name} {where} does not regularise: its expected gradient is 0 (10), what one sees is noise. "
            f"Use {_way_out(setting)}",
        )
        return
    named = "reverse" if part.config is None or part.place == "reward" else NAMED.get(part.name)
    numbers = (
        f"per token its gradient is {_range(on.reverse_error)} away from reverse KL's, "
        f"cosine {_cosine(on.reverse_cosine)}"
    )
    bounded = part.config is not None and part.config.coefficient_bound is not None
    if named is not None and descends != named and not bounded:
        yield Finding(
            WRONG,
            "objective",
            f"{part.name} {where} descends {OBJECTIVES[descends]}, not {OBJECTIVES[named]}, which it is named for: "
            f"{numbers}. For reverse KL use {_way_out(setting)}",
        )
    elif descends != "reverse":
        bound = " with its bound" if bounded else ""
        yield Finding(NOTE, "objective", f"{part.name}{bound} does not descend reverse KL: {numbers}")


def _way_out(setting: Setting) -> str:
    return {
        "verl": "kl_loss_type=k2 or k3+ (verl's own), or kl.estimator=k2 (the plugin's)",
        "openrlhf": "--algo.kl.unbiased_gradient (OpenRLHF's own), or --kl_estimator k2 (the plugin's)",
        None: "kl.estimator=k2, or k1 with kl.placement=reward",
    }[setting.framework]


def _off_policy(setting: Setting, part: Part, loss: Loss, descends: str, off: Row) -> Iterator[Finding]:
    if descends == "nothing" or part.beta == 0 or part.name == "none":
        return
    updates = setting.updates
    error = off.drift
    corrected = judge.weighted(loss)
    if corrected:
        kind = "; with clip, a token that has moved back beyond it is left alone" if _clips(part) else ""
        text = f"the KL carries the importance weight pi_theta / pi_old: error {_range(error)} at one token{kind}"
        if updates == 1:
            text += ". One update a batch: the ratio is 1 and the weight changes nothing yet; the pull is not 0"
        yield Finding(NOTE, "off_policy", text)
        return
    what = f"off-policy its gradient is {_range(error)} away from its own on-policy one"
    if updates is None:
        text = f"no importance weight: {what}. With several updates a batch use correction=clip"
        yield Finding(NOTE, "off_policy", text)
    elif updates <= 1:
        text = f"no importance weight, and none needed: one update a batch (otherwise {what})"
        yield Finding(NOTE, "off_policy", text)
    else:
        way_out = {
            "verl": "kl.correction=clip",
            "openrlhf": "--kl_correction clip, or --algo.kl.unbiased_gradient",
            None: "kl.correction=clip",
        }[setting.framework]
        yield Finding(
            WRONG,
            "off_policy",
            f"{updates:g} updates a batch without importance weight on the KL, all but the first off-policy: {what} "
            f"(policies N(0, 0.3^2) apart in their logits). Use {way_out}, or one update a batch",
        )


def _clips(part: Part) -> bool:
    return part.config is not None and part.config.correction == "clip"


def _tails(part: Part, loss: Loss) -> Iterator[Finding]:
    zones = judge.dead_zones(loss)
    if zones and part.name != "none":
        text = f"a clamp: the gradient is exactly 0 where {' and where '.join(map(_zone, zones))}"
        yield Finding(WARNING, "clamp", text)
    far = judge.coefficients(loss, torch.tensor([-10.0, 10.0]))
    low, high = far.tolist()
    if abs(low) > 100:
        text = f"heavy lower tail: at log ratio -10 the coefficient is {low:.3g} (k2's is -10), at +10 it is {high:.3g}"
        if part.config is not None and part.place == "loss":
            text += "; kl.coefficient_bound bounds it smoothly"
        yield Finding(WARNING, "tail", text)


def _zone(zone: tuple[float, float]) -> str:
    low, high = zone
    if math.isinf(low):
        return f"log(pi/pi_ref) < {high:.2f} (pi_ref gives the token over {math.exp(-high):.3g} times pi's probability)"
    if math.isinf(high):
        return f"log(pi/pi_ref) > {low:.2f} (pi gives it over {math.exp(low):.3g} times: no pull where most is due)"
    return f"{low:.2f} < log(pi/pi_ref) < {high:.2f}"


def _effective_beta(setting: Setting, part: Part) -> Iterator[Finding]:
    if not part.beta or part.beta < 0 or not setting.advantage:
        return
    whole = NORMS[setting.norm]
    if part.place == "reward" and whole and setting.norm_covers_kl:
        text = (
            f"{setting.advantage} divides the KL reward by the standard deviation {whole}: the effective beta is "
            f"beta/std, {part.beta / STD:.3g} at std {STD}, {part.beta / 0.1:.3g} at std 0.1, and moves during the run"
        )
    elif whole:
        text = (
            f"{setting.advantage} divides by the standard deviation {whole}, but not the KL: beta {part.beta:g} is "
            f"in units of the advantage; in units of the reward it is beta*std, {part.beta * STD:.3g} at std {STD}"
        )
    else:
        text = f"{setting.advantage} divides by no standard deviation: beta {part.beta:g} is in units of the reward"
    yield Finding(NOTE, "beta", text)
    if part.place == "loss" and setting.aggregation != setting.kl_aggregation:
        yield Finding(
            WARNING,
            "aggregation",
            f"the policy loss is aggregated as {setting.aggregation}, the KL always as {setting.kl_aggregation}: a "
            "token's beta beside its advantage is beta * (its response's length / the mean length), twice as strong in "
            "a response of twice the mean length",
        )


def _about_setting(setting: Setting) -> Iterator[Finding]:
    if len(setting.parts) > 1:
        yield Finding(
            WRONG,
            "double",
            "the KL is in the loss and in the reward: it counts twice, with two coefficients and two credits. "
            "Keep one of them",
        )
    if not setting.parts and not any(finding.code == "no_kl" for finding in setting.findings):
        yield Finding(NOTE, "no_kl", "no KL acts: neither in the loss nor in the reward, and no reference model runs")


def _range(spread: Spread) -> str:
    if spread.high < ROUNDING:
        return "0 %"
    return f"{100 * spread.median:.0f} % ({100 * spread.low:.0f} to {100 * spread.high:.0f})"


def _cosine(spread: Spread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f} to {spread.high:.2f})"


# -- output ----------------------------------------------------------------------------------------------------------


def to_mapping(result: Audit) -> dict[str, Any]:
    """The audit as JSON can hold it; an infinite number is the text ``inf`` or ``-inf``."""
    setting = result.setting
    return _plain(
        {
            "title": setting.title,
            "framework": setting.framework,
            "installed": result.installed,
            "parts": [
                {
                    "place": part.place,
                    "setting": part.key,
                    "name": part.name,
                    "beta": part.beta,
                    "credit": part.credit,
                    "plugin": part.config.to_mapping() if part.config else None,
                    "sentence": sentence,
                    "descends": judge.descends(loss := setting.loss(part)),
                    "importance_weight": judge.weighted(loss),
                    "zero_gradient": judge.dead_zones(loss),
                }
                for part, sentence in zip(setting.parts, result.sentences, strict=True)
            ],
            "updates": setting.updates,
            "aggregation": {"policy": setting.aggregation, "kl": setting.kl_aggregation},
            "advantage": {"estimator": setting.advantage, "divided_by": setting.norm},
            "on_policy": {name: asdict(row) for name, row in result.on_policy.items()},
            "off_policy": {name: asdict(row) for name, row in result.off_policy.items()},
            "tails": {"log_ratio": LOG_RATIOS, **result.tails},
            "findings": [asdict(finding) for finding in result.findings],
            "gradient_is_the_one_named": not result.wrong,
        }
    )


def _plain(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_plain(value) for value in node]
    if isinstance(node, float) and not math.isfinite(node):
        return str(node)
    return node


def show(result: Audit, console: Console) -> None:
    """Print the audit; readable at 80 columns and without colour."""
    console.print(Text(result.setting.title, style="bold"))
    for sentence in result.sentences:
        console.print(Text(sentence))
    console.print(_findings(result))
    if result.setting.parts:
        for title, rows in (("on-policy", result.on_policy), ("off-policy", result.off_policy)):
            console.print(Text(f"Expected gradient, {title}", style="bold"))
            console.print(_gradients(rows))
        console.print(
            Text(
                f"Exact, over all responses of {PROBLEMS} random problems; medians. error: distance to the gradient of "
                "the KL over its size, for reverse and forward KL at one token, and for the reverse KL of three-token "
                "responses (resp.). noise: standard deviation of one response's gradient over the size of its mean.",
                style="dim",
            )
        )
        console.print(Text("\nCoefficient of grad log pi at one token", style="bold"))
        console.print(_tail_table(result.tails))
    missing = [SHOWN[name] for name, version in result.installed.items() if version is None]
    if missing and result.setting.parts:
        text = f"Not installed here, so its own KL is not compared: {', '.join(missing)}."
        console.print(Text(text, style="dim"))
    verdict = "The gradient is NOT the one named." if result.wrong else "The gradient is the one named."
    if result.setting.parts or result.wrong:
        console.print(Text(verdict, style="bold"))


def _findings(result: Audit) -> Group:
    table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    styles = {WRONG: "bold red", WARNING: "yellow", NOTE: "dim"}
    for finding in result.findings:
        table.add_row(Text(finding.severity, style=styles[finding.severity]), Text(finding.text))
    return Group(Text(""), table, Text(""))


def _gradients(rows: dict[str, Row]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for heading in ("reverse\nerror", "\ncos", "forward\nerror", "\ncos", "\nnoise", "resp.\nerror", "\ncos"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in rows.items():
        table.add_row(
            Text(name, style="bold" if name.startswith("this one") else ""),
            _percent(row.reverse_error),
            f"{row.reverse_cosine.median:.2f}",
            _percent(row.forward_error),
            f"{row.forward_cosine.median:.2f}",
            f"{row.noise.median:.1f}",
            _percent(row.response_error),
            f"{row.response_cosine.median:.2f}",
        )
    return table


def _percent(spread: Spread) -> str:
    return "0 %" if spread.high < ROUNDING else f"{100 * spread.median:.0f} %"


def _tail_table(tails: dict[str, list[float]]) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    table.add_column("log(pi/pi_ref)", justify="right")
    for name in tails:
        table.add_column(name, justify="right", overflow="fold")
    for i, log_ratio in enumerate(LOG_RATIOS):
        table.add_row(f"{log_ratio:g}", *(f"{column[i] + 0.0:.3g}" for column in tails.values()))  # no -0
    return table
