# Two environments, since the frameworks' pins collide; each is built once per clone (see scripts/env).
PYTHON ?= python3.11
STEPS ?= 20
export PYTHON

.PHONY: demo demo-openrlhf test lint env-verl env-openrlhf clean

demo: env-verl            ## GRPO with k2 on verl, for real, on this machine's CPU: summary and figure
	.envs/verl/bin/kl-plugins run verl/grpo_k2 --profile cpu --steps $(STEPS) --out runs/demo

demo-openrlhf: env-openrlhf   ## the same on OpenRLHF
	.envs/openrlhf/bin/kl-plugins run openrlhf/grpo_k2 --profile cpu --steps $(STEPS) --out runs/demo-openrlhf

test: env-verl env-openrlhf lint   ## everything, against the installed wheels
	.envs/verl/bin/pytest --ignore=tests/openrlhf --ignore-glob='tests/e2e/*openrlhf*'
	.envs/openrlhf/bin/pytest tests/openrlhf tests/e2e/test_openrlhf_*.py

lint: env-verl
	.envs/verl/bin/ruff check .
	.envs/verl/bin/ruff format --check .

env-verl env-openrlhf: env-%:
	scripts/env $*

clean:
	rm -rf .envs dist runs
