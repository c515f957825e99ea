"""Every finding of the preflight, provoked: from composed recipes, and on a real two-node cluster."""

import copy
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from ray_cluster import two_nodes

from kl_plugins.launch import preflight, submit
from kl_plugins.launch.needs import at, parameters
from kl_plugins.launch.plan import LaunchError, package_folder
from kl_plugins.launch.recipes import find_recipe

FRAMEWORK = "verl" if package_folder("verl") else "openrlhf"


def make(out, recipe, *native, profile="cpu", **more):
    return submit.make_job(find_recipe(recipe), profile=profile, out=out / "run", native=list(native), **more)[0]


def texts(findings, level="fail"):
    return [finding.text for finding in findings if finding.level == level]


ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
BATCH = {
    # What of the CPU profile is changed, and the words of the one finding that follows.
    f"{ROLLOUT}.tensor_model_parallel_size=2": "GPUs of a rollout replica",
    f"{ACTOR}.ppo_mini_batch_size=32": f"data.train_batch_size=16 is less than {ACTOR}.ppo_mini_batch_size=32",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=48": "48 does not divide 64",
    f"trainer.n_gpus_per_node=2 {ACTOR}.ppo_micro_batch_size_per_gpu=64": "64 does not divide 32",
    "trainer.n_gpus_per_node=2": "(reference): 128 does not divide 64",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=null": f"{ACTOR}.ppo_micro_batch_size_per_gpu is not set",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=100": "(old log-probs): 100 does not divide 128",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null": "log_prob_micro_batch_size_per_gpu is not set",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=100": "(reference): 100 does not divide 128",
    f"trainer.n_gpus_per_node=2 {ACTOR}.ulysses_sequence_parallel_size=4": "GPUs of one model copy and all GPUs: 4",
    f"trainer.n_gpus_per_node=3 {ACTOR}.use_dynamic_bsz=true": "ranks and actor_rollout_ref.actor.ppo_mini_batch_size",
    "trainer.v1.trainer_mode=separate_async": "parameter_sync_step x ppo_mini_batch_size is 32, train_batch_size 16",
    f"{ROLLOUT}.temperature=0": "divide the policy's and the reference's logits by it",
    f"{ACTOR}.use_kl_loss=false": "no reference model is started",
    "algorithm.use_kl_in_reward=true": "the KL is in the loss",
    "+ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS=4": "env_vars.OMP_NUM_THREADS is in the job's",
    "+ray_kwargs.ray_init.runtime_env.py_modules=[a]": "py_modules is in the job's",
}
CRITIC = {
    "critic.ppo_micro_batch_size_per_gpu=48": "critic.ppo_micro_batch_size_per_gpu and a rank's part of",
    "critic.ppo_mini_batch_size=24": "is less than critic.ppo_mini_batch_size=24",
    f"{ACTOR}.use_kl_loss=true": "the KL is in the loss",
    "algorithm.use_kl_in_reward=false": "kl.placement=reward with algorithm.use_kl_in_reward=false",
}
VERL = [("verl/grpo_k2", *case) for case in BATCH.items()] + [
    ("verl/ppo_k1_in_reward", *case) for case in CRITIC.items()
]


@pytest.mark.parametrize(("recipe", "change", "says"), VERL)
def test_verl_fails(verl, tmp_path, recipe, change, says):
    findings = preflight.check(make(tmp_path, recipe, *change.split()))
    bad = [f for f in findings if f.level == "fail"]
    assert any(says in f.text for f in bad), findings
    assert all(f.remedy for f in bad)
    with pytest.raises(LaunchError, match="nothing was submitted"):
        preflight.require(findings)


def test_verls_own_validation_is_of_one_mind(verl, tmp_path):
    """Where verl checks the arithmetic before it starts Ray, it refuses what is refused here, and nothing else."""
    changes = ["trainer.n_gpus_per_node=1", f"{ACTOR}.ppo_mini_batch_size=32", "trainer.n_gpus_per_node=3"]
    changes.append(f"{ACTOR}.ppo_micro_batch_size_per_gpu=null")
    jobs = [make(tmp_path, "verl/grpo_k2", change) for change in changes]
    for i, job in enumerate(jobs):
        (tmp_path / f"{i}.yaml").write_text(job.plan.config)
    code = (
        "import sys\nfrom omegaconf import OmegaConf\nfrom verl.utils.config import validate_config\n"
        "for path in sys.argv[1:]:\n"
        "    try:\n        validate_config(OmegaConf.load(path), True, False)\n        print('WELL')\n"
        "    except (AssertionError, ValueError) as error:\n        print('REFUSED')\n"
        "    except Exception as error:\n        print('REFUSED' if 'Please set' in str(error) else error)\n"
    )
    paths = [str(tmp_path / f"{i}.yaml") for i in range(len(jobs))]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    verdicts = [line for line in done.stdout.splitlines() if line in ("WELL", "REFUSED")]
    assert verdicts == ["WELL", "REFUSED", "REFUSED", "REFUSED"], done.stdout + done.stderr
    assert [bool(texts(preflight.check(job))) for job in jobs] == [False, True, True, True]


WARNED = {
    "data.train_batch_size=12": "verl pads them to 128",
    f"{ROLLOUT}.top_p=0.9": "cut the sampler's distribution",
    f"{ROLLOUT}.top_k=20": "cut the sampler's distribution",
    f"{ACTOR}.kl_loss_coef=0": "kl_loss_coef=0: the reference model is loaded",
    "actor_rollout_ref.model.trust_remote_code=true": "Python code that comes with the model is run on every node",
    f"{ACTOR}.strategy=veomni": "batch arithmetic is not known here",
    "critic.enable=true critic.strategy=veomni": "critic.strategy=veomni: its batch arithmetic",
}


@pytest.mark.parametrize(("change", "says"), WARNED.items())
def test_verl_warns(verl, tmp_path, change, says):
    findings = preflight.check(make(tmp_path, "verl/grpo_k2", *change.split()))
    assert any(says in text for text in texts(findings, "warn")), findings
    preflight.require(findings)


@pytest.mark.parametrize("recipe", ["grpo_k2", "grpo_k3", "ppo_k1_in_reward"])
def test_recipes_are_well(recipe, tmp_path):
    findings = preflight.check(make(tmp_path, f"{FRAMEWORK}/{recipe}"))
    assert texts(findings) == []
    assert any("reference: " in text for text in texts(findings, "ok"))
    assert any("batches: " in text for text in texts(findings, "ok"))
    assert any("temperature 1.0 for sampler, policy and reference alike" in text for text in texts(findings, "ok"))


@pytest.mark.parametrize("profile", ["node", "cluster", *(["megatron"] if FRAMEWORK == "verl" else [])])
@pytest.mark.parametrize("recipe", ["paper_1p5b", "paper_7b"])
def test_the_papers_recipes_are_well(recipe, profile, tmp_path):
    job = make(tmp_path, f"{FRAMEWORK}/{recipe}", profile=profile)
    assert texts(preflight.check(job)) == []
    needs = preflight._needs(job)
    assert needs.gpus == (16 if profile == "cluster" else 8)
    assert set(needs.paths.values()) >= {f"openr1-math/train.{'parquet' if FRAMEWORK == 'verl' else 'jsonl'}"}
    assert needs.copies == 2


OPENRLHF = {
    "rollout.n_samples_per_prompt=1": "group_norm compares the answers of one prompt",
    "actor.num_gpus_per_node=2": "pieces of rollout.micro_batch_size=256: 2 does not divide 1",
    "actor.num_gpus_per_node=2 rollout.micro_batch_size=128": "micro_batch_size=128 x 2 ranks and",
    "actor.num_gpus_per_node=3 train.dynamic_batch_enable=true": "3 ranks and train.batch_size: 3 does not divide 128",
    "ds.ring_attn_size=2": "ds.ring_attn_size x ds.tensor_parallel_size and",
    "train.colocate_all=true vllm.num_engines=2": "train.colocate_all: vllm.num_engines x",
    "train.colocate_actor_ref=true ref.num_gpus_per_node=2": "actor and reference share GPUs",
    "ref.num_gpus_per_node=0": "needs a reference model",
    "rollout.temperature=0": "divide the policy's and the reference's logits by it",
}


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """OpenRLHF's parser takes 9 s: one job, and the findings of its configuration with some keys changed."""
    if FRAMEWORK != "openrlhf":
        pytest.skip("needs OpenRLHF's environment")
    folder = tmp_path_factory.mktemp("composed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KL_PLUGINS_CACHE", str(folder))
        job = make(folder, "openrlhf/grpo_k2")

    def check(*changes):
        config = yaml.safe_load(job.plan.config)
        for change in changes:
            key, _, value = change.partition("=")
            *path, last = key.split(".")
            node = config
            for part in path:
                node = node.setdefault(part, {})
            node[last] = yaml.safe_load(value)
        return preflight.check(replace(job, plan=replace(job.plan, config=yaml.safe_dump(config))))

    return check


@pytest.mark.parametrize(("change", "says"), OPENRLHF.items())
def test_openrlhf_fails(openrlhf, composed, change, says):
    assert texts(composed()) == []
    bad = [f for f in composed(*change.split()) if f.level == "fail"]
    assert any(says in f.text for f in bad), bad
    assert all(f.remedy for f in bad)


def test_openrlhf_warns(openrlhf, composed):
    warned = texts(composed("train.batch_size=192", "train.micro_batch_size=192", "rollout.top_p=0.9"), "warn")
    assert any("OpenRLHF always trusts remote code" in text for text in warned)
    assert any("responses of two steps" in text for text in warned)
    assert any("cut the sampler's distribution" in text for text in warned)


def test_no_kl_no_reference(openrlhf, tmp_path):  # case 21
    job = make(tmp_path, "openrlhf/grpo_k2", "algo.kl.init_coef=0", "kl.estimator=none")
    assert any("no reference model is started" in text for text in texts(preflight.check(job), "ok"))
    assert [pool.what for pool in preflight._needs(job).pools] == ["actor", "vLLM"]


def test_kl_in_two_places_is_refused_by_the_parser(openrlhf, tmp_path):  # case 20
    with pytest.raises(LaunchError, match="two places"):
        make(tmp_path, "openrlhf/grpo_k2", "kl.placement=reward", "algo.kl.use_loss=true")


def test_a_hook_of_ones_own(openrlhf, tmp_path):  # case 26
    job = make(tmp_path, "openrlhf/grpo_k2", given={"worker_process_setup_hook": "mine.setup"})
    assert any("worker_process_setup_hook is mine.setup" in text for text in texts(preflight.check(job)))


def test_openrlhf_defaults_are_its_own(openrlhf):
    code = (
        "import json; from kl_plugins.cpu import openrlhf as cpu; cpu.install()\n"
        "from kl_plugins.openrlhf.command import openrlhf_parser\n"
        "from kl_plugins.launch.needs_openrlhf import DEFAULTS\n"
        "parser = openrlhf_parser(); print(json.dumps({k: parser.get_default(k) for k in DEFAULTS}))"
    )
    env = os.environ | {"KL_PLUGINS_CPU": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert json.loads(done.stdout.splitlines()[-1]) == import_module("kl_plugins.launch.needs_openrlhf").DEFAULTS


def test_variables_that_verl_always_sets(verl, tmp_path, monkeypatch):  # case 26
    """verl's own function, in a driver that has each variable of the job, against what the preflight names."""
    from verl.trainer import constants_ppo

    from kl_plugins.launch.needs_verl import ALWAYS, FORWARDED

    known = set(re.findall(r'"([A-Z][A-Z0-9_]{4,})"', Path(constants_ppo.__file__).read_text()))
    for name in known:
        monkeypatch.setenv(name, "1")
    still = set(constants_ppo.get_ppo_ray_runtime_env()["env_vars"])
    assert still == {*ALWAYS, *FORWARDED}
    given = {"env_vars": dict.fromkeys(known, "1")}
    bad = texts(preflight.check(make(tmp_path, "verl/grpo_k2", given=given)))
    assert {text.split()[0].removeprefix("env_vars.") for text in bad} == still


def test_known_versions_are_the_adapters():
    if FRAMEWORK == "verl":
        from kl_plugins.verl.adapter import WRAPPED as wrapped
    else:
        from kl_plugins.openrlhf.known import PPO_ACTOR as wrapped
    known = import_module(f"kl_plugins.launch.needs_{FRAMEWORK}").VERSIONS
    assert all(set(function.sources) == set(known) for function in wrapped)


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_parameters_are_counted_as_transformers_does(kind):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = dict(hidden_size=64, num_hidden_layers=3, vocab_size=512, intermediate_size=160, num_attention_heads=4)
    sizes |= {"num_key_value_heads": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, tie_word_embeddings=False))
    count = sum(p.numel() for p in model.parameters())
    assert parameters(sizes) == pytest.approx(count, rel=0.01)  # all but norms and biases
    assert parameters({"hidden_size": 64}) is None
    assert parameters(None) is None


WORDS = [
    "a b",
    "$HOME;'x'",
    '"',
    "[a]",
    "+k='v w'",
    "é ü",
    "",
    "a\\b",
    "*",
    "`id`",
    "it's $HOME; [a] & \\more",
    "#x",
    "~",
]


def test_a_command_survives_either_ray():
    """Ray 2.55 quotes a pasted command as for Windows, and hands it to a Unix shell."""
    quoted = subprocess.list2cmdline([submit._through_list2cmdline(word) for word in WORDS])
    said = subprocess.run(["sh", "-c", f"printf '%s\\n' {quoted}"], capture_output=True, text=True).stdout
    assert said.split("\n")[:-1] == WORDS
    for word in ('\\"', "a\nb", "a \\"):
        with pytest.raises(LaunchError, match="without --dry-run"):
            submit._through_list2cmdline(word)


# On a real cluster.


@pytest.fixture(scope="module")
def cluster():
    with two_nodes(gpus=1, cpus=2) as nodes:
        yield nodes


QUESTION = """
import json, sys
from pathlib import Path
from kl_plugins.launch import preflight, submit
from kl_plugins.launch.recipes import find_recipe
address, recipe, out, native, given = json.loads(sys.argv[1])
job, _ = submit.make_job(find_recipe(recipe), profile="cpu", out=Path(out) / "run", native=native, given=given)
print(json.dumps(preflight.question(submit.connect(address), job, address)))
"""


def reply_to(cluster, out, recipe, *native, given=None):
    """The cluster's reply about a job, as `make`, same arguments, makes it.

    Asked by a process of its own: Ray reads once in a process's life whether there is a token.
    """
    words = json.dumps([cluster.address, recipe, str(out), native, given])
    done = cluster.command(Path(sys.executable), "-c", QUESTION, words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


TWO = {"verl": ["trainer.nnodes=2"], "openrlhf": ["actor.num_nodes=2"]}[FRAMEWORK]
DATA = {
    "verl": ["data.train_files=[/no/such.parquet,hdfs://remote/x.parquet]", "trainer.save_freq=1"],
    "openrlhf": ["data.prompt_dataset=/no/such.jsonl", "ckpt.save_steps=1"],
}[FRAMEWORK]
MODEL = {"verl": "actor_rollout_ref.model.path", "openrlhf": "actor.model_name_or_path"}[FRAMEWORK]


@pytest.mark.timeout(600)
def test_all_that_a_cluster_lacks_at_once(cluster, tmp_path, monkeypatch):
    big = tmp_path / "big"
    big.mkdir()
    sizes = dict(hidden_size=8192, num_hidden_layers=80, vocab_size=152064, intermediate_size=29568)
    (big / "config.json").write_text(json.dumps(sizes | {"num_attention_heads": 64, "num_key_value_heads": 8}))
    given = {"env_vars": {"VERL_USE_EXTERNAL_MODULES": "no_such_module"}}
    words = [f"{MODEL}={big}", *DATA, *TWO]
    monkeypatch.setenv("KL_PLUGINS_CACHE", cluster.env["KL_PLUGINS_CACHE"])
    asked = (cluster.folder / "token", f"{FRAMEWORK}/grpo_k2", *words)  # --out would be below a file
    job, reply = make(*asked, given=given), reply_to(cluster, *asked, given=given)
    findings = list(preflight.judge(reply, job))
    bad = texts(findings)
    assert any("such" in text and "not visible from any node" in text for text in bad), bad
    assert not any(str(big) in text and "not visible" in text for text in bad)
    assert any("the head cannot write" in text and "token/run" in text for text in bad)
    assert any("73 billion parameters by its config.json" in text for text in bad)
    assert all(f.remedy for f in findings if f.level != "ok")
    if FRAMEWORK == "verl":
        assert any("no_such_module cannot be imported" in text for text in bad)
        assert any("verl asks Ray for 3 CPU cores beside each GPU" in text for text in bad)
    else:
        assert any("4 GPUs asked for (actor 2 + reference 1 + vLLM 1), 2 there" in text for text in bad)
    # The package came, and the head's gradient is right, on either node; the framework is the known one.
    assert len([text for text in texts(findings, "ok") if "gradient [0.3297" in text]) == 2
    assert any(f"{FRAMEWORK} {reply_version(reply)} on 2 nodes" in text for text in texts(findings, "ok"))

    def changed(job=job, /, **node):
        """The findings, had the second node said so."""
        altered = copy.deepcopy(reply)
        altered["nodes"][list(reply["nodes"])[1]] |= node
        return list(preflight.judge(altered, job))

    one = list(reply["nodes"])[1]
    assert any(f"not visible from node {one}" in t for t in texts(changed(**{"no paths": [str(big)]})))
    assert any("differs between nodes" in t for t in texts(changed(version="0.0.1")))
    assert any(f"has {FRAMEWORK} 0.0.1" in t for t in texts(changed(version="0.0.1")))
    assert any(f"has no {FRAMEWORK}" in t for t in texts(changed(version=None)))
    assert any(f"node {one} gave no answer: gone" in t for t in texts(changed(failed="gone")))
    assert any("kl_plugins 0.0.0" in t for t in texts(changed(plugin={**node(reply)["plugin"], "version": "0.0.0"})))
    there = replace(job, out=tmp_path)
    altered = copy.deepcopy(reply)
    altered["nodes"][one]["strange folders"] = [str(tmp_path)]
    assert any(f"{tmp_path} on node {one} is not the head's" in t for t in texts(preflight.judge(altered, there)))
    monkeypatch.setenv("KL_PLUGINS_ALLOW_UNKNOWN", "1")  # travels with the job
    allowed = make(tmp_path, f"{FRAMEWORK}/grpo_k2")
    assert any(f"has {FRAMEWORK} 0.0.1" in t for t in texts(changed(allowed, version="0.0.1"), "warn"))

    # GPUs: all, on one node, and in use.
    for native, says in {
        "verl": {
            "trainer.nnodes=4": "4 GPUs asked for (trainer 4), 2 there: 1 on",
            "trainer.n_gpus_per_node=2": "trainer: no 1 x 2 GPUs, 2 of them on one node each",
        },
        "openrlhf": {"vllm.num_engines=4": "6 GPUs asked for (actor 1 + reference 1 + vLLM 4), 2 there: 1 on"},
    }[FRAMEWORK].items():
        other = make(tmp_path, f"{FRAMEWORK}/grpo_k2", native)
        assert any(says in text for text in texts(preflight.judge(reply, other)))
    if FRAMEWORK == "verl":
        small = make(tmp_path, "verl/grpo_k2")
        roomy = copy.deepcopy(reply)
        for said in roomy["nodes"].values():
            said["CPU"] = 16
        assert any("GPUs: 1 asked for (trainer 1), 2 there" in t for t in texts(preflight.judge(roomy, small), "ok"))
        busy = roomy | {"free GPUs": 0}
        assert any("0 of 2 free now: verl gives up at once" in t for t in texts(preflight.judge(busy, small)))
    assert any("lacks typer" in t for t in texts(preflight.judge(reply | {"not importable": ["typer"]}, job)))
    strange = preflight.judge(reply | {"executable": "/usr/bin/python"}, job)
    assert any("runs under /usr/bin/python" in t for t in texts(strange, "warn"))


def node(reply):
    return next(iter(reply["nodes"].values()))


def reply_version(reply):
    return node(reply)["version"]


@pytest.mark.timeout(300)
def test_the_command_says_all_and_submits_nothing(cluster, tmp_path):
    words = ["--profile", "cpu", "--out", tmp_path / "run", "--python", "/no/such/python", "--preflight-only"]
    broken = {"verl": f"{ROLLOUT}.temperature=0", "openrlhf": "rollout.temperature=0"}[FRAMEWORK]
    done = cluster.command("submit", f"{FRAMEWORK}/grpo_k2", "--address", cluster.address, *words, broken)
    assert done.returncode == 2, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAIL ")]
    assert len(failed) == 2
    assert "divide the policy's and the reference's logits by it" in failed[0]
    assert "the head did not look at its nodes" in failed[1]
    assert "/no/such/python" in failed[1]
    assert "-> --python: " in done.stdout
    assert "refused: 2 problems above; nothing was submitted" in done.stderr
    assert not (tmp_path / "run").exists()


def test_needs_read_what_is_composed(tmp_path):
    job = make(tmp_path, f"{FRAMEWORK}/ppo_k1_in_reward")
    needs = preflight._needs(job)
    assert needs.model == at(yaml.safe_load(job.plan.config), MODEL)
    assert preflight._on_nodes(job, needs) == {}  # the demo makes its own
