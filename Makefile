# make demo   train a small MoE GPT on real text, stock Megatron against FSSDP
# make test   lint and all tests
# make bench  step time, stock against FSSDP, skewed and balanced
# make balance  what every planner leaves, on recorded loads
# Each sets up what it needs in .venv; nothing else is to be installed.

DATA ?=
OUT ?= demo-out
# One thread a rank: ranks share the cores.
export OMP_NUM_THREADS = 1

.PHONY: demo test test-oldest bench balance format clean

demo: .venv
	.venv/bin/python examples/demo.py --out "$(OUT)" $(if $(DATA),--data "$(DATA)")

test: .venv
	.venv/bin/ruff check . && .venv/bin/ruff format --check .
	.venv/bin/python -m pytest tests
	$(MAKE) test-oldest

# The oldest Megatron we support needs Python 3.11; where there is none (or it is the main one), this part is left out.
test-oldest:
	@if .ci/env.sh .venv-oldest 3.11; then \
	    .venv-oldest/bin/python -m pytest -m "not newest" tests/test_parity.py tests/test_checkpoint.py \
	        tests/test_experts.py tests/test_hook.py; \
	else echo "Python 3.11 not found: megatron-core 0.16.1 is not tested"; fi

bench: .venv
	.venv/bin/python bench/step_time.py

# Imbalance left, traffic and planning time of our planner and of all others, on recorded and synthetic loads: 10 minutes
balance: .venv
	.venv/bin/python bench/balance.py
	.venv/bin/python bench/planner_speed.py

format: .venv
	.venv/bin/ruff check --fix . ; .venv/bin/ruff format .

.venv: FORCE
	@.ci/env.sh .venv 3.12 3.11

FORCE:

clean:
	rm -rf .venv .venv-oldest demo-out
