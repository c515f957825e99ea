"""The page in Debian's chromium, headless, through its DevTools protocol: what a reader sees, wide and narrow."""

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import time

import pytest
from matplotlib.image import imread

from kl_plugins.report.overlay import DARK, LIGHT
from kl_plugins.report.page import write_report

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.environ.get("KL_PLUGINS_NO_BROWSER") == "1", reason="KL_PLUGINS_NO_BROWSER=1"),
]
NARROW, WIDE = (375, 812), (1280, 900)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
]


class Page:
    """A tab of the browser, and all that it reported."""

    def __init__(self, socket):
        self.socket = socket
        self.sent = 0
        self.events = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params):
        self.sent += 1
        self.socket.send(json.dumps({"id": self.sent, "method": method, "params": params}))
        while True:
            answer = json.loads(self.socket.recv(timeout=120))
            if answer.get("id") == self.sent:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, url: str, size: tuple[int, int], scheme: str = "light"):
        self.events.clear()
        width, height = size
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(json.loads(self.socket.recv(timeout=120)))
        self.run("Promise.all([...document.images].map(image => image.decode()))")

    def run(self, script: str):
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def errors(self) -> list:
        """Uncaught exceptions, console errors and warnings, the browser's own complaints (blocked by policy, …)."""
        self.run("1")  # whatever was reported before this answer is among the events
        found = [e["params"] for e in self.events if e["method"] == "Runtime.exceptionThrown"]
        logged = [e["params"] for e in self.events if e["method"] == "Runtime.consoleAPICalled"]
        entries = [e["params"]["entry"] for e in self.events if e["method"] == "Log.entryAdded"]
        return found + [c for c in logged if c["type"] in ("error", "warning")] + entries

    def requests(self) -> list[str]:
        """Addresses asked for, but for those whose content is in the address itself."""
        asked = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith("data:")]

    def picture(self, whole: bool = False):
        """What is on the screen as ``[H, W, 3]``, 0 to 1; `whole` for the page from top to bottom."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        return imread(io.BytesIO(base64.b64decode(shot["data"])))[..., :3]

    def _clip(self, whole: bool) -> dict:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    from websockets.sync.client import connect

    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.fail(
            "no chromium: apt-get install -y chromium, or KL_PLUGINS_NO_BROWSER=1 to go without this test",
            pytrace=False,
        )
    profile = tmp_path_factory.mktemp("chromium")
    with open(profile / "log.txt", "w") as log:
        process = subprocess.Popen(
            [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=log,
            stderr=log,
            start_new_session=True,  # the browser and its helpers end together
        )
    try:
        address = profile / "DevToolsActivePort"  # written when it listens: the port, then the browser's own path
        until = time.monotonic() + 120
        while not address.exists() or len(address.read_text().splitlines()) < 2:
            assert process.poll() is None, (profile / "log.txt").read_text()
            assert time.monotonic() < until, "chromium did not start: " + (profile / "log.txt").read_text()
            time.sleep(0.1)
        port, path = address.read_text().splitlines()
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None) as browser:
            target = Page.__new__(Page)
            target.socket, target.sent, target.events = browser, 0, []
            tab = target.call("Target.createTarget", url="about:blank")["targetId"]
            with connect(f"ws://127.0.0.1:{port}/devtools/page/{tab}", max_size=None, proxy=None) as socket:
                yield Page(socket)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def report(tmp_path_factory, made_up_run):
    """Three runs of different kinds, one with a name that would be markup if it were let."""
    root = tmp_path_factory.mktemp("report")
    paths = [
        made_up_run(root / "verl-grpo_k2", 24, "k2"),
        made_up_run(root / "<img src=x onerror=alert(1)> $x_1$", 60, "k3", seed=1),
        made_up_run(root / "verl alone", 18, "k1", seed=2, ours=False),
    ]
    return write_report(paths, root / "out")[0]


@pytest.fixture(scope="session")
def twelve(tmp_path_factory, made_up_run):
    root = tmp_path_factory.mktemp("twelve")
    kinds = [(estimator, i) for i in range(3) for estimator in ("k1", "k2", "k3", "none")]
    paths = [made_up_run(root / f"verl-grpo_{e}-{i}", 20 + 5 * i, e, seed=n) for n, (e, i) in enumerate(kinds)]
    return write_report(paths, root / "out")[0]


IMAGES = """[...document.images].map(image => {
    const box = image.getBoundingClientRect();
    return {alt: image.alt, kind: image.className, natural: image.naturalWidth, complete: image.complete,
            left: box.left, right: box.right, width: box.width, height: box.height,
            shown: image.checkVisibility({opacityProperty: true, visibilityProperty: true})};
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("which", ["report", "twelve"])
def test_a_reader_sees_it(page, request, which, size, scheme):
    index = request.getfixturevalue(which)
    page.open(index.as_uri(), size, scheme)
    assert page.errors() == []
    assert page.requests() == [index.as_uri()]

    width = size[0]
    assert page.run("document.documentElement.scrollWidth") <= width
    images = page.run(IMAGES)
    charts = [image for image in images if image["kind"] == "chart"]
    assert len(charts) == len(list(index.parent.glob("*.png"))) > 20
    for image in images:
        assert image["complete"], image
        assert image["natural"] > 0, image
        assert image["shown"], image
    for chart in charts:
        assert chart["width"] > 300, chart
        assert chart["height"] > 200, chart
        assert chart["left"] >= 0, chart
        assert chart["right"] <= width, chart
        assert chart["width"] > 0.85 * chart["natural"], "shrunk until its text is too small to read"
        assert "from" in chart["alt"], chart
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(int(part) for part in ground[4:-1].split(",")) > 380) == (scheme == "light")


@pytest.mark.parametrize(("scheme", "palette"), [("light", LIGHT), ("dark", DARK)])
def test_the_curves_are_on_the_screen(page, report, scheme, palette):
    """An image can have a size and nothing on it: pixels of each curve's colour are counted in the first chart."""
    page.open(report.as_uri(), WIDE, scheme)
    box = page.run("document.querySelector('.hero img').getBoundingClientRect().toJSON()")
    top, bottom, left, right = (round(box[side]) for side in ("top", "bottom", "left", "right"))
    seen = page.picture(whole=True)[top:bottom, left:right]
    for colour in palette[4:7]:
        wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (abs(seen - wanted).max(axis=-1) < 0.08).sum() > 250, colour
    assert abs(seen[2, 2] - [int(palette[0][i : i + 2], 16) / 255 for i in (1, 3, 5)]).max() < 0.02


def test_reward_against_kl_comes_first(page, report):
    page.open(report.as_uri(), WIDE)
    alt = page.run("document.querySelector('main img').alt")
    assert alt.startswith("Line chart of reward (mean of the responses) against KL as logged"), alt
    assert page.run("document.querySelector('main h2').textContent") == "Reward against KL"


def test_names_of_runs_are_text(page, report):
    page.open(report.as_uri(), WIDE)
    assert page.run("[...document.querySelectorAll('[onerror], script')].length") == 0
    assert "<img src=x onerror=alert(1)> $x_1$" in page.run("document.querySelector('tbody').textContent")


def test_an_assistive_reader_gets_tables_and_names(page, report):
    page.open(report.as_uri(), NARROW)
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {}
    for node in tree:
        if not node["ignored"]:
            roles.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    assert len(roles["table"]) == 2
    assert all(roles["table"])
    assert len(roles["rowheader"]) == 6
    assert len(roles["columnheader"]) > 10
    assert len(roles["image"]) > 20
    assert all(roles["image"])
    assert len(roles["heading"]) > 20
    links = page.run("[...document.querySelectorAll('nav a')].map(a => document.querySelector(a.hash) !== null)")
    assert len(links) > 5
    assert all(links)


def test_the_checks_can_fail(page, tmp_path):
    """A page that does each thing that is forbidden is noticed."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<body style='width: 2000px'><script>console.error('no'); throw new Error('no')</script>"
        "<img src='http://127.0.0.1:9/a.png'>"
    )
    with pytest.raises(AssertionError, match="Uncaught"):
        page.open(bad.as_uri(), NARROW)
    assert len(page.errors()) >= 2
    assert "http://127.0.0.1:9/a.png" in page.requests()
    assert page.run("document.documentElement.scrollWidth") > 375
