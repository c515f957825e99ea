import base64
import io
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from kl_plugins.report.compare import QUANTITIES, ReportError
from kl_plugins.report.overlay import (
    DARK,
    LIGHT,
    NARROW,
    Curve,
    draw,
    elide,
    log_threshold,
    short,
    spread,
    style,
    to_png,
    to_svg,
    without_common,
)
from kl_plugins.report.page import write_report


class Parsed(HTMLParser):
    """Elements with their attributes, and the text of each table cell."""

    VOID = frozenset({"meta", "link", "img", "source", "br"})

    def __init__(self, text: str):
        super().__init__()
        self.elements, self.open, self.tables, self.text = [], [], [], ""
        self.feed(text)
        assert self.open == [], "elements that are not closed"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture
def write(tmp_path, made_up_run):
    """``write(*runs)``: the page of runs, each given as ``made_up_run``'s arguments, and its folder."""

    def make(*runs):
        paths = [made_up_run(tmp_path / f"{i}" / run[0], *run[1:]) for i, run in enumerate(runs)]
        index, _ = write_report(paths, tmp_path / "out")
        return Parsed(index.read_text(encoding="utf-8")), index.parent

    return make


def svg(uri: str) -> str:
    head, _, body = uri.partition("base64,")
    assert head == "data:image/svg+xml;"
    return base64.b64decode(body).decode()


def test_two_runs(write):
    page, out = write(("grpo_k2", 24, "k2"), ("grpo_k3", 18, "k3", 1))
    charts = [image for image in page.all("img") if image["class"] == "chart"]
    assert charts[0]["alt"].startswith("Line chart of reward (mean of the responses) against KL of the sampling policy")
    assert "A, grpo_k2: from" in charts[0]["alt"]
    files = {file.name for file in out.glob("*.png")}
    assert len(charts) == len(files)
    assert {"reward_by_kl.png", "reward_by_step.png", "k3_by_kl.png", "beta_by_step.png"} <= files
    assert "seconds_by_kl.png" not in files
    assert "kl_sampled_by_kl.png" not in files  # against itself
    linked = {link["href"] for link in page.all("a") if link["href"].endswith(".png")}
    assert linked == files
    for file in files:
        picture = imread(out / file)[..., :3]
        assert 0.01 < (picture.mean(axis=-1) < 0.9).mean() < 0.3


def test_nothing_is_loaded_and_nothing_runs(write, few):
    page, _ = write(("a", few(5)), ("b", few(5)))
    for tag, attrs in page.elements:
        assert tag != "script"
        assert not any(name.startswith("on") for name in attrs)
        for name in ("src", "srcset"):
            assert attrs.get(name, "data:").startswith("data:")
        assert tag != "link" or attrs["href"] == "data:,"
        assert tag != "a" or not re.match(r"\w+:|//", attrs["href"])
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    for image in page.all("img"):
        tree = ElementTree.fromstring(svg(image["src"]))
        loaded = [v for node in tree.iter() for k, v in node.attrib.items() if k.endswith("href")]
        assert all(value.startswith("#") for value in loaded)
        assert not [node for node in tree.iter() if node.tag.endswith(("script", "image", "foreignObject"))]


NASTY = "<img src=x onerror=alert(1)>&\"'{{ 7 * 7 }} $\\frac{1}{2}$ <svg onload=alert(1)>"


def test_names_and_settings_are_text(tmp_path, made_up_run, few):
    path = made_up_run(tmp_path / NASTY, few(12))
    (path / "config.yaml").write_text("kl: {estimator: '<script>alert(1)</script>', correction: '</td><b>'}")
    other = made_up_run(tmp_path / "b", few(12))
    index, _ = write_report([path, other], tmp_path / "out", "</title><script>alert(1)</script>")
    page = Parsed(index.read_text(encoding="utf-8"))
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "svg"})
    assert NASTY in page.text
    assert "<script>alert(1)</script> in the loss, </td><b>" in page.text
    assert not any("onerror" in attrs or "onload" in attrs for _, attrs in page.elements)
    alts = [image["alt"] for image in page.all("img")]
    assert any(NASTY in alt for alt in alts)
    for image in page.all("img"):
        tree = ElementTree.fromstring(svg(image["src"]))
        assert not [node for node in tree.iter() if node.tag.endswith(("script", "}img"))]


def test_tables(write, few):
    page, _ = write(("fast", few(20), "k1"), ("slow", few(10, seed=1), "k2"))
    runs, aligned = page.tables
    assert runs[0][:3] == ["Run", "Steps", "Reward"]
    assert [row[1] for row in runs[1:]] == ["20", "10"]
    assert runs[1][-1] == "k1 in the loss, clip"
    assert runs[1][0].split() == ["A", "fast"]
    assert [cell.strip() for cell in aligned[0]] == ["Run", "at step", "at KL of the sampling policy"]
    assert aligned[1][:3] == ["3", "5", "10"]
    assert len(aligned[2]) == 1 + len(aligned[1])
    for column in range(len(aligned[1])):
        numbers = [row[column + 1] for row in aligned[2:]]
        assert all(re.fullmatch(r"0\.\d+", number) for number in numbers), numbers
    scopes = [th.get("scope") for th in page.all("th")]
    assert all(scopes)
    assert scopes.count("row") == 4
    assert len(page.all("caption")) == 2
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in page.all("a") if a["href"].startswith("#")} <= set(ids)


def test_the_higher_of_each_column_is_marked(write):
    rows = [{"step": s, "reward": 0.1 * s, "kl": 0.1 * s, "pg_loss": 0.0, "kl/sampled": 0.1 * s} for s in (1, 2, 3, 4)]
    page, _ = write(("low", rows), ("high", [row | {"reward": 2 * row["reward"]} for row in rows]), ("tie", rows))
    assert len(page.all("strong")) == len(page.tables[1][1])


def test_one_run_of_one_step(write):
    page, out = write(("alone", 1))
    assert page.all("h1")
    assert "alone" in page.text
    assert len(list(out.glob("*.png"))) > 20
    assert "1 steps" not in page.text


def test_no_kl_at_all(write, made_up):
    page, out = write(("a", [{**row, "kl": None} for row in made_up(6, ours=False)]))
    assert "nothing to align by but the step" in page.text
    assert not list(out.glob("*_by_kl.png"))


def test_a_run_that_blew_up(write, made_up):
    rows = made_up(30)
    for row in rows[15:]:
        row["kl/k3"] = 10.0 ** row["step"]
        row["kl/coef_max"] = None
    page, out = write(("well", 30), ("blown", rows, "k3"))
    alt = next(image["alt"] for image in page.all("img") if image["alt"].startswith("Line chart of k3"))
    assert "e29" in alt
    assert "coefficient, largest: no finite number at 15 of 30 steps" in page.text
    assert (imread(out / "k3_by_step.png")[..., :3].mean(axis=-1) < 0.9).mean() > 0.01


def test_twelve_long_runs(write):
    page, out = write(*((f"grpo-{i}", 120 + i, "k2", i) for i in range(12)))
    assert len(page.tables[0]) == 13
    assert (out / "index.html").stat().st_size < 12e6


def test_a_second_report_replaces_the_first(tmp_path, made_up_run, few):
    out = tmp_path / "out"
    write_report([made_up_run(tmp_path / "a", [row | {"kl/k2": 0.1} for row in few(5)])], out)
    assert (out / "k2_by_step.png").exists()
    (out / "notes.txt").write_text("mine")
    first = {file.name: file.read_bytes() for file in out.iterdir()}
    write_report([made_up_run(tmp_path / "b", few(5))], out)
    assert not (out / "k2_by_step.png").exists()
    assert (out / "notes.txt").read_text() == "mine"
    write_report([tmp_path / "a"], out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == first  # and nothing depends on the time


def test_a_folder_that_is_none(tmp_path, made_up_run, few):
    run = made_up_run(tmp_path / "a", few(3))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ReportError, match="is not a folder"):
            write_report([run], out)
    with pytest.raises(ReportError, match="does not exist"):
        write_report([tmp_path / "gone"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command(tmp_path, made_up_run, few):
    from kl_plugins.cli import app

    runs = [str(made_up_run(tmp_path / name, few(5))) for name in ("a", "b")]
    done = CliRunner().invoke(app, ["report", *runs, "-o", str(tmp_path / "out"), "--title", "Monday"])
    assert done.exit_code == 0, done.output
    assert str(tmp_path / "out" / "index.html") in done.output
    assert "<h1>Monday</h1>" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    refused = CliRunner().invoke(app, ["report", *runs, str(tmp_path / "gone"), "-o", str(tmp_path / "none")])
    assert refused.exit_code == 2
    assert "gone does not exist" in refused.output


def test_it_needs_no_torch():
    code = "import sys, kl_plugins.report.page, kl_plugins.report.overlay; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# Charts


def test_curves_differ_without_colour():
    looks = [style(i) for i in range(26)]
    assert len({(str(look["linestyle"]), look["marker"]) for look in looks}) == 26


def test_a_curve_is_drawn_where_its_numbers_are():
    rising = Curve(0, "A", "rising", [0.0, 1.0], [0.0, 1.0])
    axes = draw([rising], "x", "y", NARROW).axes[0]
    (line,) = [x for x in axes.lines if len(x.get_xdata()) == 2]
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([0, 1], [0, 1])
    assert [text.get_text() for text in axes.texts] == ["A rising"]


@pytest.mark.parametrize("name", ["$x$", "$x_$", "\\frac_a"])
def test_a_dollar_in_a_name_is_a_dollar(name):
    figure = draw([Curve(0, "A", name, [0.0], [0.0])], "KL", "y $a$", NARROW)
    texts = [node.text for node in ElementTree.fromstring(to_svg(figure)[0]).iter() if node.tag.endswith("}text")]
    assert {f"A {name}", "y $a$"} <= set(texts)
    assert len(to_png(figure)) > 1000


def test_both_palettes(tmp_path):
    light, dark = to_svg(draw([Curve(i, "A", "a", [0.0, 1.0], [0.0, 1.0]) for i in range(6)], "x", "y", NARROW))
    for mine, other in zip(LIGHT, DARK, strict=True):
        assert mine in light
        assert other in dark
        assert mine not in dark
    strip = re.compile("#[0-9a-f]{6}")
    assert strip.sub("", light) == strip.sub("", dark)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(palette):
    """WCAG: 4.5 for text, 3 for lines; here 4.5 for both."""
    assert len(set(palette)) == len(palette) == len(LIGHT)
    ground, ink, faint, _, *curves = palette
    for colour in (ink, faint, *curves):
        low, high = sorted((luminance(ground), luminance(colour)))
        assert (high + 0.05) / (low + 0.05) >= 4.5, colour


def test_spread():
    assert spread([5.0, 5.0, 9.0], 2, 0, 10) == [5, 7, 9]
    assert spread([10.0, 10.0, 10.0], 2, 0, 10) == [6, 8, 10]
    assert spread([1.0, 0.0], 2, 0, 10) == [2, 0]
    assert spread([5.0, 5.0, 5.0], 100, 0, 10) == [0, 5, 10]
    assert spread([], 2, 0, 10) == []


def test_words_for_charts():
    assert without_common(["verl-grpo_k2-7", "verl-grpo_k3-7"]) == ["k2", "k3"]
    assert without_common(["k2", "k3"]) == ["k2", "k3"]
    assert without_common(["run", "run-long"]) == ["run", "run-long"]
    assert without_common(["only-one"]) == ["only-one"]
    assert elide("grpo_k2-seed1", 20) == "grpo_k2-seed1"
    assert elide("grpo_k2_with_a_long_name_seed1", 16) == "grpo_k2…me_seed1"
    assert [short(x) for x in (0, 0.1234, 1234.5, 1e-7, -2.5e12, 250_000)] == [
        "0",
        "0.123",
        "1,234",
        "1e-7".replace("-", "−"),
        "−2.5e12",
        "250,000",
    ]


def test_log_scale_only_where_a_linear_one_would_hide():
    assert log_threshold([0.1, 0.2, 0.3]) is None
    assert log_threshold([0.0, 0.0]) is None
    assert log_threshold([]) is None
    assert log_threshold([0.1, 0.2, 0.3, 0.2, 1e5]) == 0.1


def test_slugs_are_safe_in_file_names():
    slugs = [quantity.slug for quantity in QUANTITIES]
    assert len(set(slugs)) == len(slugs)
    assert all(re.fullmatch("[a-z0-9_]+", slug) for slug in slugs)


def test_png_is_the_light_one_at_twice_the_pixels():
    picture = imread(io.BytesIO(to_png(draw([Curve(0, "A", "a", [0.0], [0.0])], "x", "y", NARROW))))
    assert picture.shape[1] == pytest.approx(2 * 96 * NARROW[0], abs=1)
    assert picture[0, 0, :3].min() > 0.98
