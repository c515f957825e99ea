"""The doctor on a real two-node cluster where one node lacks the package, and on broken installations."""

import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from ray_cluster import bare_python, free_ports

import kl_plugins
from kl_plugins.doctor import checks
from kl_plugins.doctor.probe import probe
from kl_plugins.launch.plan import package_folder

PURELIB = Path(sysconfig.get_paths()["purelib"])


def levels(findings):
    return [f.level for f in findings]


def test_gradient_is_the_hand_computed_one():
    report = probe(False, False)
    assert "error" not in report
    assert report["gradient"] == pytest.approx(checks.GRADIENT, abs=1e-6)
    assert levels(checks.judge_node("n", report)) == ["ok"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gradient": [0.3297443, -0.361935]}, "gradient on a fixed input is"),
        ({"version": "0.0.0"}, "kl_plugins 0.0.0 at"),
        ({"verl": "verl is imported, and its ppo_loss is verl's own"}, "ppo_loss is verl's own"),
        ({"openrlhf": "DriftError: moved"}, "DriftError: moved"),
    ],
)
def test_a_node_that_differs_is_a_problem_with_a_remedy(change, words):
    findings = list(checks.judge_node("n", probe(False, False) | change))
    (bad,) = [f for f in findings if f.level == "fail"]
    assert words in bad.text
    assert bad.remedy


def test_installed_package_is_well():
    assert set(levels(checks.copies())) == {"ok"}
    assert levels(checks.entry_point()) == ["ok"]
    assert levels(checks.estimators()) == ["ok"]


@pytest.mark.parametrize("name", ["verl", "openrlhf"])
def test_installed_framework_fits(name, monkeypatch):
    monkeypatch.setenv("KL_PLUGINS_CPU", "1" if name == "openrlhf" else "0")
    (finding,) = checks.framework(name)
    assert finding.level == "ok", finding.text


def metadata(folder, version, *files):
    info = folder / f"kl_plugins-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kl-plugins\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{f},,\n" for f in (f"{info.name}/METADATA", *files)))
    return folder


def test_two_copies_and_stale_metadata_are_told_apart(tmp_path, monkeypatch):  # case 28
    here = kl_plugins.__version__
    monkeypatch.syspath_prepend(metadata(tmp_path / "copy", here))
    bad = [f for f in checks.copies() if f.level == "fail"]
    assert len(bad) == 1
    assert "more than once" in bad[0].text
    assert str(tmp_path / "copy") in bad[0].text

    monkeypatch.syspath_prepend(metadata(tmp_path / "old", "0.0.9", "kl_plugins/gone.py"))
    texts = [f.text for f in checks.copies() if f.level == "fail"]
    assert any("stale metadata" in t and "1 of its files are gone" in t for t in texts)


def test_a_hidden_entry_point_is_found_out(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    (finding,) = checks.entry_point()
    assert finding.level == "fail"
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in finding.text
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "kl_plugins.verl")
    assert levels(checks.entry_point()) == ["ok"]


@pytest.fixture
def two_nodes(tmp_path):
    """A head with kl_plugins and a second node without; ended by process id."""
    (port,) = free_ports(1)
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    start = "from ray.scripts.scripts import main; main()"
    common = ["--num-cpus=1", "--block", "--disable-usage-stats"]
    head = [sys.executable, "-c", start, "start", "--head", f"--port={port}", "--include-dashboard=false", *common]
    second = [str(bare_python(tmp_path / "bare")), "-c", start, "start", f"--address=127.0.0.1:{port}", *common]
    processes = []
    try:
        for command, log in ((head, "head.log"), (second, "second.log")):
            out = open(tmp_path / log, "wb")  # noqa: SIM115
            processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True))
            time.sleep(12 if log == "head.log" else 8)
            assert processes[-1].poll() is None, (tmp_path / log).read_text()[-2000:]
        yield f"127.0.0.1:{port}", env
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)


@pytest.mark.skipif(
    PURELIB not in Path(kl_plugins.__file__).parents, reason="an editable install is on every worker's path"
)
@pytest.mark.timeout(420)
def test_two_node_cluster_where_one_node_lacks_the_package(two_nodes, tmp_path):
    address, env = two_nodes
    command = [str(Path(sys.executable).parent / "kl-plugins"), "doctor", "--address", address]
    # Not from the repository: Ray puts the driver's folder on its workers' path, the second node's as well.
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("ok   node ") for line in lines) == 1, done.stdout
    (bad,) = [i for i, line in enumerate(lines) if line.startswith("FAIL node ")]
    assert "No module named 'kl_plugins'" in lines[bad]
    assert "wheel" in lines[bad + 1]
    assert "2 nodes asked" in done.stdout


@pytest.mark.timeout(300)
def test_local_ray_and_no_cluster(tmp_path):
    command = [str(Path(sys.executable).parent / "kl-plugins"), "doctor"]
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    env["KL_PLUGINS_CPU"] = "1" if package_folder("openrlhf") else "0"
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all well\n")
    env["RAY_AUTH_MODE"] = "disabled"
    done = subprocess.run([*command, "--address", "127.0.0.1:1"], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert "FAIL no Ray cluster at 127.0.0.1:1" in done.stdout
