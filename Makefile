# The one interface. Needs make and Python 3.11 or newer; everything else it fetches itself.
#
#   make up                                 talk to the demo model
#   make up ARGS="--port 9000 --engines 2"  any argument of `baton up`
#   make test ARGS="-k tokenizer"           any argument of pytest

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
TORCH  ?= auto
LOOK   ?=
MYPY_WORKERS ?= auto
MYPY_CACHE ?= .mypy_cache
FOR    ?= 3.12
OUT    ?= .wheels
THERE  ?=

BIN     := $(VENV)/bin
# Says how much it fetches (LOOK=--unannounced: does not, and is quicker); without an NVIDIA driver it takes PyTorch's build
# without CUDA (TORCH=any: as pip finds it).
INSTALL := $(BIN)/python -m deploy.set_up --torch $(TORCH) $(LOOK)
RUNTIME := $(VENV)/.runtime-installed
DEV     := $(VENV)/.dev-installed
KERNELS := $(VENV)/.kernels-built
SOURCES := shared services kvstore deploy tests

.DEFAULT_GOAL := help
.PHONY: help setup up down test test-extras test-faults test-hosts test-ray test-kernels test-tiles test-slow fuzz test-gpu test-compose lint fmt proto bench bench-guard chaos hostile docs wheels install-offline gpu-report house clean

help: ## this list
	@awk -F ':.*## ' '/^## / {print "\n" substr($$0, 4)} /^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nArguments of what is run: make up ARGS="--port 9000", make test ARGS="-k tokenizer"\n'

## Serve
setup: $(RUNTIME) $(KERNELS) ## installs what serving needs, into .venv; `make up` does so by itself

up: setup ## serves the demo model; another one: make up ARGS="--model DIR --port 9000"
	@$(BIN)/baton up $(ARGS)

down: setup ## ends a stack that `baton up --detach` started
	@$(BIN)/baton down $(ARGS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): pyproject.toml | $(BIN)/python
	@$(INSTALL) --extras worker,encoder,audio,kvstore,cli
	@touch $@

$(DEV): pyproject.toml | $(BIN)/python
	@$(INSTALL) --extras worker,encoder,audio,kvstore,cli,dev
	@touch $@ $(RUNTIME)

# Built here, the first start need not; without a compiler the worker uses torch's own operators.
$(KERNELS): $(RUNTIME) $(wildcard services/worker/ops/native/*)
	@if [ -f services/worker/ops/native/build.py ]; then \
	  $(BIN)/python -m services.worker.ops.native.build || echo "native kernels not built: the worker goes without"; fi
	@touch $@

## Test
# Several processes (tests/conftest.py); each takes whole files: what their tests share is made once. One: ARGS="-n 0".
test: $(DEV) $(KERNELS) ## what serves; the other lanes are below
	$(BIN)/python -m pytest -m "not slow and not extras and not faults and not kernels and not hosts and not ray" -n auto --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 3 $(ARGS)

test-extras: $(DEV) $(KERNELS) ## what is beside serving: offline, benchmarks, simulation, tuning, Kubernetes, the wheel
	$(BIN)/python -m pytest -m "extras and not slow and not faults" -n auto --dist loadfile --no-loadscope-reorder --durations 10 \
	  $$($(BIN)/python -c 'from tests.support.left_out import EXTRAS; print(*EXTRAS)') \
	  $$(grep -rlE --include='test_*.py' 'by_lane\(|mark\.extras' tests/integration) $(ARGS)

test-faults: $(DEV) $(KERNELS) ## stacks whose parts are killed, hang, or are sent hostile input
	$(BIN)/python -m pytest -m "faults and not slow" -n auto --dist loadfile --no-loadscope-reorder --durations 10 tests/faults $$(grep -rl --include='test_*.py' 'mark\.faults' tests/integration) $(ARGS)

test-kernels: $(DEV) ## Triton's kernels in its interpreter and compiler; needs no GPU
	$(BIN)/python -m pytest -m "kernels and not slow" -n auto --durations 5 tests/unit/worker/ops/triton tests/integration/worker/test_triton_operations.py $(ARGS)

# The kernels of Xeons with AMX, whose tile instructions tests/support/tiles emulates elsewhere: needs AVX512-BF16 and g++.
test-tiles: $(DEV) $(KERNELS) ## the native kernels as Xeons with AMX run them; emulated where there is none
	$(BIN)/python -m pytest -p tests.support.tiles.lane -m "not slow" -n auto --dist loadfile --durations 5 tests/unit/worker/ops/native tests/unit/worker/models/test_native_decoder.py $(ARGS)

test-slow: $(DEV) $(KERNELS) ## tests that take minutes, and new examples for properties
	$(BIN)/python -m pytest -m slow --ignore=tests/fuzz $(ARGS)
	$(BIN)/python -m pytest -m "not slow" --hypothesis-profile=search tests/properties

# Hosts are namespaces; the tests are in one of their own. Needs root, or a kernel that lets users have namespaces.
UNSHARED := unshare --net --mount $(if $(filter 0,$(shell id -u)),,--user --map-root-user)
test-hosts: $(DEV) $(KERNELS) ## stacks of several hosts, as namespaces of this one; needs root
	BATON_TEST_HOSTS=1 $(UNSHARED) $(BIN)/python -m pytest -m hosts --durations 10 tests/hosts $(ARGS)

test-ray: $(DEV) $(KERNELS) ## stacks on a Ray cluster on this machine
	$(BIN)/python -m pytest -m ray --durations 10 tests/ray $(ARGS)

# Most of their time is compiling kernels, on one core: several processes share it.
test-gpu: $(DEV) ## tests that need a GPU, and those of kernels on it
	$(BIN)/python -m pytest -n 8 --dist worksteal tests/gpu $$(grep -rl --include='test_*.py' tests.support.kernels.kernel_device tests) $(ARGS)

test-compose: $(DEV) ## builds the images and chats through docker-compose
	$(BIN)/python -m pytest -m slow tests/integration/deploy/test_compose.py $(ARGS)

fuzz: $(DEV) $(KERNELS) ## 20,000 hostile HTTP requests and a million spoilt bus messages; minutes
	nice -n 10 $(BIN)/python -m pytest -m slow -s tests/fuzz $(ARGS)

## Change the code
lint: $(DEV) ## ruff, mypy, import-linter
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	@# On a busy machine its processes may begin later than the 3 s that it gives them: it ends with 2 then.
	$(BIN)/mypy --cache-dir $(MYPY_CACHE) --num-workers $(MYPY_WORKERS) || { [ $$? = 2 ] && $(BIN)/mypy --cache-dir $(MYPY_CACHE); }
	$(BIN)/lint-imports

fmt: $(DEV) ## formats and fixes what can be fixed
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

docs: $(DEV) ## builds docs/ as a site in build/docs/site; fails at a broken link
	@$(BIN)/python -m tests.docs_site

house: $(DEV) ## size and order of the code base in figures
	@$(BIN)/python -m tests.architecture.house $(ARGS)

proto: $(DEV) ## makes the Python of kvstore/transfer/transfer.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. kvstore/transfer/transfer.proto

clean: ## removes .venv and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

## Measure
bench: setup ## measures a running stack: make bench ARGS="serve --max-concurrency 16"
	@$(BIN)/baton bench $(ARGS)

bench-guard: setup ## this checkout beside the last version; fails where it is slower beyond chance
	@$(BIN)/python -m tests.campaigns guard $(ARGS)

# Two of what it kills, and everything that a stack can have. Other layouts: make chaos ARGS="--tp 2 --pp 2".
chaos: setup ## an hour of faults under load; shorter: make chaos ARGS="--duration 300"
	@$(BIN)/baton chaos --duration 3600 --engines 2 --kvstore-memory 64MiB --redis --output-json chaos.json $(ARGS)

# What grows between the two passes is kept for good.
hostile: setup ## hostile clients beside good ones, twice each: texts, pauses, 5xx, file descriptors, memory; 10 minutes
	@$(BIN)/baton chaos --faults calm,hostile --passes 2 --engines 1 --kvstore-memory 64MiB --output-json hostile.json $(ARGS)

gpu-report: setup ## on a GPU: all measurements, stage by stage
	@$(BIN)/baton bench gpu --out gpu-report $(ARGS)

## Install without a network
wheels: ## here: all wheels for a machine without a network (FOR=3.12 OUT=.wheels THERE=its-packages.txt)
	$(PYTHON) -m deploy.without_network.wheels --python $(FOR) --out $(OUT) $(if $(THERE),--there $(THERE))

install-offline: ## there: .venv from those wheels (OUT=.wheels)
	$(PYTHON) -m deploy.without_network.install --wheels $(OUT) --venv $(VENV)
