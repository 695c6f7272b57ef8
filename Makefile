# make demo   train a GPT several times larger than the memory it is allowed, and verify it
# make check  lint, the laws, and the tests that your change reaches, in about 3 minutes on two cores
# make test   all tests: Python, C++, and on a stand-in for CUDA those that need a GPU
# make test-full, zoo, bench-check   whole products of parameters; every model; every case of the benchmarks' drivers
# make layouts   500 random layouts of 1 to 4 ranks, each compared with one process of plain torch
# make plans     200 random plans, each run and compared with what was planned
# make docs   the documentation as a site, in build/site
# make bench  the benchmark table          make lint   formatting, lint, types, layers
# make oldest the laws with the oldest torch that is supported     make image  the image of Dockerfile
# Every target but image first sets up what it needs (scripts/setup.sh): .venv, pinned packages, the build.

PYTHON ?= python3
export PYTHON

DEMO_STEPS ?= 40
DEMO_ARGS ?= --layers 12 --hidden 384 --heads 6 --seq 64 --batch 4 --activation-checkpointing \
             --steps $(DEMO_STEPS) --device-bytes 80MiB --host-bytes 0
BENCH_ARGS ?= runtime
PYTEST_ARGS ?=
LAYOUTS_ARGS ?=
PLANS_ARGS ?=

.PHONY: demo check test test-full zoo layouts plans bench-check bench docs lint format package image oldest sanitize setup clean

setup:
	@scripts/setup.sh

demo: setup
	@scripts/demo.sh $(DEMO_ARGS)

check: setup
	@scripts/check.sh fast

test: setup
	@scripts/check.sh py $(PYTEST_ARGS)
	@scripts/check.sh cpp
	@scripts/check.sh standin

test-full: setup
	@scripts/check.sh full

zoo: setup
	@scripts/check.sh zoo

layouts: setup
	@scripts/check.sh layouts $(LAYOUTS_ARGS)

plans: setup
	@scripts/check.sh plans $(PLANS_ARGS)

bench-check: setup
	@scripts/check.sh bench

bench: setup
	.venv/bin/gemini bench $(BENCH_ARGS)

docs: setup
	@scripts/setup.sh browser
	@scripts/check.sh docs

lint: setup
	@scripts/check.sh lint

format: setup
	@scripts/check.sh format

package: setup
	@scripts/check.sh package

image:
	@scripts/check.sh image

oldest: setup
	@scripts/check.sh oldest

sanitize: setup
	@scripts/check.sh sanitize

clean:
	rm -rf .venv build dist demo-output *.egg-info benchmarks/*.egg-info benchmarks/build gemini/_C.*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
