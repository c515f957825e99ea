# Two environments, since the frameworks' pins collide; each is built once per clone (see scripts/env).
PYTHON ?= python3.11
STEPS ?= 20
# What depends on the framework beside it and is therefore run in both environments.
BOTH = tests/audit tests/benchmarks tests/cpu tests/data tests/docs tests/doctor tests/launch tests/recipes tests/report/test_curves.py \
  tests/test_package.py tests/test_drift.py
export PYTHON

.PHONY: demo demo-openrlhf test bench lint env-verl env-openrlhf clean

demo: env-verl            ## GRPO with k2 on verl, for real, on this machine's CPU: summary and figure
	.envs/verl/bin/kl-plugins run verl/grpo_k2 --profile cpu --steps $(STEPS)

demo-openrlhf: env-openrlhf   ## the same on OpenRLHF
	.envs/openrlhf/bin/kl-plugins run openrlhf/grpo_k2 --profile cpu --steps $(STEPS)

test: env-verl env-openrlhf lint   ## everything, against the installed wheels
	.envs/verl/bin/pytest
	.envs/openrlhf/bin/pytest $(BOTH) tests/openrlhf tests/e2e

bench: env-verl env-openrlhf   ## time and memory beside the frameworks and other alternatives (docs/performance.md)
	mkdir -p runs
	.envs/verl/bin/python -m benchmarks --json runs/bench-verl.json
	.envs/openrlhf/bin/python -m benchmarks head step --json runs/bench-openrlhf.json

lint: env-verl
	.envs/verl/bin/ruff check .
	.envs/verl/bin/ruff format --check .

env-verl env-openrlhf: env-%:
	scripts/env $*

clean:
	rm -rf .envs dist runs
