PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# CUDA builds of torch depend on the Triton they were built for; CPU builds bring none, and the kernel tests need one.
TRITON_OF_CPU_TORCH := "triton==3.6.0; sys_platform == 'linux'"
# Tests are many and small: one thread each, one process per core and two more, since tests of several ranks wait for timeouts; who is done
# first takes from the others.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)
# They start many processes: bytecode is written even where the environment says not to. Freed memory stays with its process: returning it
# and clearing new pages takes 3 % of the time.
RUN_TESTS := OMP_NUM_THREADS=1 MALLOC_TRIM_THRESHOLD_=1000000000 MALLOC_MMAP_THRESHOLD_=1000000000 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help install demo kernels style test test-torches test-transformers test-all test-faults fuzz mutants test-gpu campaign-gpu sanitize-gpu lint bench bench-gpu docs docs-serve clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## a virtual environment in .venv with all that development needs

$(STAMP): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt torch
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet $(TRITON_OF_CPU_TORCH)
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -e '.[dev]'
	@touch $@

demo: install ## a packed batch over four processes, forward and backward, compared with one process
	$(BIN)/python -m longspan.cli demo

kernels: install ## compile the kernels that are part of the package, for Hopper GPUs, and those that tests check; needs none. Only those that changed
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python tests/kernels/build_prebuilt.py
	for script in hopper latent_decode triton; do PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python tests/kernels/$${script}_compile.py --record || exit 1; done

style: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

lint: style ## style, import layers and types
	$(BIN)/mypy

test: style ## style, types and the test suite (a covering sample of the large grids); types beside the tests, whose processes often wait
	$(BIN)/mypy & types=$$!; $(RUN_TESTS); tests=$$?; wait $$types && exit $$tests

TORCHES ?= 2.11.0 2.12.0
test-torches: ## a smoke test with other versions of torch, TORCHES; their environments are cached in ~/.cache/longspan-ci
	PYTHON=$(PYTHON) .ci/torch_versions $(TORCHES)

TRANSFORMERS ?= 5.23.0
OTHER := build/transformers-$(TRANSFORMERS)
test-transformers: install ## the tests of integrations with another transformers, TRANSFORMERS
	test -d $(OTHER)/transformers || $(BIN)/python -m pip install --quiet --no-deps --target $(OTHER) transformers==$(TRANSFORMERS)
	PYTHONPATH=$(OTHER) $(RUN_TESTS) tests/integrations

test-all: lint ## the same with the whole grids
	$(RUN_TESTS) --whole-grid

SECONDS ?= 60
fuzz: install ## random calls against a dense float64 oracle for SECONDS; a wrong one is minimised to a script in build/fuzz
	PYTHONPATH=src:. OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds $(SECONDS) --first $$(date +%s) --json

RUNS ?= 100000
test-faults: install ## faults of real processes at every exchange: killed, stopped, late, raising, disagreeing ranks; RUNS of them at random; half an hour for all
	PYTHONPATH=src:. $(BIN)/python -m tests.faults --runs $(RUNS) --json

SAMPLE ?= 30
SEED ?= 0
mutants: install ## mutation testing: SAMPLE random one-line changes of src/, each of which some test should notice; runs all tests once, then seconds each
	PYTHONPATH=src:. $(BIN)/python tests/mutants.py --sample $(SAMPLE) --seed $(SEED) --json

JOBS ?= 8
test-gpu: ## tests that need a GPU, with the Python and torch at hand: installs nothing; JOBS processes, since most of the time is compiling; TRITON=folder of another Triton
	seq $(JOBS) | PYTHONPATH=$(TRITON:%=%:)src xargs -P $(JOBS) -I{} $(PYTHON) -m pytest -m gpu -q -p no:cacheprovider --part {}/$(JOBS)

campaign-gpu: ## random campaigns on a GPU until each has its count, five minutes at most: calls, invariance, caches, selections; installs nothing
	PYTHON=$(PYTHON) bash tests/gpu_campaign.sh

sanitize-gpu: ## compute-sanitizer over the Hopper kernels; fails at any report but racecheck's kinds that the script explains
	PYTHONPATH=src:. compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 1 $(PYTHON) tests/kernels/hopper_sanitizer_cases.py
	LONGSPAN_PREBUILT=0 PYTHONPATH=src:. compute-sanitizer --tool racecheck --print-limit 100000 $(PYTHON) tests/kernels/hopper_sanitizer_cases.py | $(PYTHON) tests/kernels/racecheck_filter.py

bench: install ## what can be measured without a GPU
	$(BIN)/python bench/masks.py
	$(BIN)/python bench/cpu.py
	$(BIN)/python bench/plans.py
	$(BIN)/python bench/engine_cpu.py
	$(BIN)/python bench/memory_cpu.py

bench-gpu: ## on a Hopper GPU: kernels against their peers, the engine against torch's ring, into bench/results; installs nothing
	PYTHONPATH=src:. $(PYTHON) bench/hopper.py --json | tee bench/results/hopper.txt
	PYTHONPATH=src:. $(PYTHON) bench/engine_gpu.py --kernel hopper --json | tee bench/results/engine_gpu_hopper.txt
	PYTHONPATH=src:. $(PYTHON) bench/peers.py --json | tee bench/results/peers.txt
	PYTHONPATH=src:. $(PYTHON) bench/hopper.py --plot bench/results/hopper.txt bench/results/hopper.png

docs: install ## the documentation site, strict, into build/site
	$(BIN)/mkdocs build --strict --quiet

docs-serve: install ## the documentation site on localhost, rebuilt at every change
	$(BIN)/mkdocs serve

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
