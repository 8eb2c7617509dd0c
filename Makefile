# make demo       train a small MoE GPT on real text: stock Megatron, then FSSDP, then compare
# make test       lint, types, budgets and one test of each kind of fault; the oldest Megatron too, if there is a Python 3.11
# make test-fast  the tests that start no ranks
# make test-between  the versions of Megatron between the oldest and the newest
# make test-all   everything: all layouts and settings, thousands of random cases, sanitizers, and bugs planted to see
#                  that tests catch them
# make test-nightly  FSSDP in frameworks' own modules, of the checkouts that the environment names (tests/README.md)
# make test-bridge  Megatron-Bridge's own recipes on CPU ranks, in an environment of its own: 4 to 5 minutes
# make test-bridge-0.4  the oldest Bridge, that of AReaL, over the Megatron that AReaL pins
# make lint       lint, types and budgets alone
# make bench      step time, stock against FSSDP, skewed and balanced; time of the host
# make balance    what every planner leaves, on recorded loads, and how long planning takes
# make gpu        on a machine with a GPU: check and time everything, results in build/gpu; 50 minutes at most
# make gpu-bundle IMAGE=LIST  the wheels that `make gpu` needs on a machine without internet that has the packages in the
#                  file LIST, in build/gpu-image.tar
# make format     format the code
# Each sets up what it needs in .venv; nothing else is to be installed.

DATA ?=
OUT ?= demo-out
IMAGE ?=
BIN = .venv/bin
OLDEST = tests/training/test_layouts.py tests/training/test_flex.py tests/training/test_checkpoint.py tests/test_hook.py \
    tests/switch_on/test_classification.py tests/switch_on/test_wrappers.py tests/training/test_rehoming.py
BETWEEN = 0.17.1 0.18.2
# Which tests other versions of Megatron run; `make test-all` runs the slow ones there, too.
OTHERS = not newest and not slow
# One thread a rank: ranks share the cores.
export OMP_NUM_THREADS = 1
# Tests of two processes at a time fill two cores; WORKERS=0 runs one test after the other.
WORKERS ?= 2
PYTEST = -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test test-fast test-all test-oldest test-between test-nightly test-bridge test-bridge-0.4 lint bench \
    balance gpu gpu-bundle format clean

demo: .venv
	$(BIN)/python examples/demo.py --out "$(OUT)" $(if $(DATA),--data "$(DATA)")

test: lint
	$(BIN)/python $(PYTEST) -m "not slow"
	$(MAKE) test-oldest

test-fast: .venv
	$(BIN)/python $(PYTEST) -m "fast and not slow"

test-all: lint
	$(BIN)/python $(PYTEST)
	$(MAKE) test-oldest OTHERS="not newest"
	$(MAKE) test-between OTHERS="not newest"

lint: .venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/python .ci/budgets.py

# The oldest Megatron we support needs Python 3.11; where there is none, this part is left out.
test-oldest:
	@if .ci/env.sh .venv-oldest 3.11; then \
	    .venv-oldest/bin/python $(PYTEST) -m "$(OTHERS)" $(OLDEST); \
	else echo "Python 3.11 not found: megatron-core 0.16.1 is not tested"; fi

# The versions between need Python 3.12, as the newest does.
test-between: $(BETWEEN:%=test-between-%)

test-between-%: .venv
	@if .venv/bin/python -c "import sys; sys.exit(sys.version_info < (3, 12))"; then \
	    .ci/between_env.sh .venv $* && .venv-$*/bin/python $(PYTEST) -m "$(OTHERS)" $(OLDEST); \
	else echo "Python 3.12 not found: megatron-core $* is not tested"; fi

test-nightly: .venv
	$(BIN)/python $(PYTEST) tests/nightly

test-bridge: .venv
	.ci/bridge_env.sh .venv
	.venv-bridge/bin/python -m pytest tests/bridge

test-bridge-0.4: .venv
	.ci/bridge_env.sh .venv 0.4.0 0.17.0 5.3.0
	.venv-bridge-0.4.0/bin/python -m pytest tests/bridge -m "not newest"

bench: .venv
	$(BIN)/python bench/step_time.py
	$(BIN)/python bench/host.py
	$(BIN)/python bench/begin.py

balance: .venv
	$(BIN)/python bench/balance.py
	$(BIN)/python bench/planner_speed.py

# Uses what is there: nothing could be installed on a machine without internet.
gpu:
	$(firstword $(wildcard $(BIN)/python) python3) bench/gpu.py

gpu-bundle: .venv
	$(BIN)/python bench/gpu_bundle.py --for-image "$(IMAGE)"

format: .venv
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

.venv: FORCE
	@.ci/env.sh .venv 3.12 3.11

FORCE:

clean:
	rm -rf .venv .venv-* demo-out
