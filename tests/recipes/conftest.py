import pytest


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Nothing of the caller's decides what a recipe resolves to."""
    for name in ("VERL_USE_EXTERNAL_MODULES", "RAY_ADDRESS", "KL_PLUGINS_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with `model/`: a tokenizer and the configuration of a model, no weights; stands for the hub's."""
    from transformers import Qwen2Config

    from kl_plugins.cpu.addition import make_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    make_tokenizer().save_pretrained(folder / "model")
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    config = Qwen2Config(vocab_size=264, num_key_value_heads=2, architectures=["Qwen2ForCausalLM"], **shape)
    config.save_pretrained(folder / "model")
    return folder
