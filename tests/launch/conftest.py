import pytest

from kl_plugins.launch.plan import package_folder


@pytest.fixture
def verl():
    if package_folder("verl") is None:
        pytest.skip("needs verl's environment")


@pytest.fixture
def openrlhf():
    if package_folder("openrlhf") is None:
        pytest.skip("needs OpenRLHF's environment")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, tmp_path):
    """Nothing of the caller's decides a test, and no test writes to the caller's cache."""
    for name in ("VERL_USE_EXTERNAL_MODULES", "RAY_ADDRESS", "KL_PLUGINS_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KL_PLUGINS_CACHE", str(tmp_path / "cache"))
