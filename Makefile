# A fresh machine needs git, make and Python 3.11 or newer; everything else goes into .venv.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all test-torch wheel docs docs-check lint soak lasting killing killing-components mutants hf bench bench-gpu clean

demo: .venv/.demo
	@echo "== training a small language model on two ranks (Ctrl-C stops it; the next time it goes on from there)"
	@$(BIN)/python examples/train_lm.py --resume

# the cases of one day (tests/nightly.py), and all of them. What is compiled is kept wherever one runs: three workers and
# dozens of processes import it
test: .venv/.installed
	@echo "== tests: what is dear in turns; make test-all runs all"
	@HYPOTHESIS_PROFILE=day PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal

test-all: .venv/.installed
	@echo "== all tests"
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal

lint: .venv/.installed
	@echo "== ruff and pyright"
	@$(BIN)/ruff check .
	@$(BIN)/pyright

# the documentation, in docs/_build/html; every warning is an error
docs: .venv/.docs
	@echo "== building the documentation"
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "== docs/_build/html/index.html"

# every link, and every page in a browser: wants chromium (apt-get install chromium)
docs-check: docs
	@echo "== looking at every page"
	@$(BIN)/python docs/check.py

.venv/.docs: .venv/.demo
	@echo "== installing the extra docs"
	@$(PIP) -e '.[docs]'
	@touch $@

# an environment outside of the repository, for what must not find the source beside it
ENVIRONMENTS ?= $(or $(TMPDIR),/tmp)/fzero-environments
OTHER = $(ENVIRONMENTS)/torch-$(VERSION)-$(notdir $(PYTHON))
WHEEL = $(ENVIRONMENTS)/wheel
TESTS ?= tests
WORKERS ?= 3

# the tests on another version of torch: make test-torch VERSION=2.11.0, of some only with TESTS=tests/base. The ordinary
# wheels bring 5 GB of CUDA packages, and run on a CPU all the same
test-torch:
	@test -n "$(VERSION)" || { echo "Say which: make test-torch VERSION=2.11.0"; exit 1; }
	@echo "== installing torch $(VERSION) and the extras examples, hf, test in $(OTHER)"
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@echo "torch==$(VERSION)" > $(OTHER)/constraints.txt
	@$(OTHER)/bin/pip install -q --disable-pip-version-check -c $(OTHER)/constraints.txt torch
	@$(OTHER)/bin/pip install -q --disable-pip-version-check -c $(OTHER)/constraints.txt -e '.[examples,hf,test]'
	@echo "== tests on torch $(VERSION)"
	@PYTHONDONTWRITEBYTECODE= $(OTHER)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

# dist/fzero-*.whl, and the tests of what it installs in an empty environment, with a C++ compiler and without one
wheel:
	@echo "== building the wheel"
	@rm -rf dist build/lib build/bdist.* $(WHEEL)
	@$(PYTHON) -m pip wheel -q --disable-pip-version-check --no-deps -w dist .
	@echo "== installing torch, then the wheel with the extras examples, hf, test, in $(WHEEL)"
	@$(PYTHON) -m venv $(WHEEL)
	@$(WHEEL)/bin/pip install -q --disable-pip-version-check -c constraints.txt torch
	@$(WHEEL)/bin/pip install -q --disable-pip-version-check -c constraints.txt "$$(echo dist/*.whl)[examples,hf,test]"
	@mkdir $(WHEEL)/tree && cp -r tests examples benchmarks notebooks docs *.md *.cff LICENSE Makefile *.txt pyproject.toml $(WHEEL)/tree
	@cd $(WHEEL)/tree && ../bin/python -c 'import fzero; print("==", fzero.__file__)'
	@echo "== tests with a C++ compiler"
	@cd $(WHEEL)/tree && PYTHONDONTWRITEBYTECODE= ../bin/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)
	@echo "== tests without one"
	@cd $(WHEEL)/tree && CXX=/nonexistent PYTHONDONTWRITEBYTECODE= ../bin/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

# all tests; then programs drawn inside fn and around it, against plain torch: make soak MINUTES=30 SEED=20000
MINUTES ?= 10
SEED ?= 0
soak: test-all
	@OMP_NUM_THREADS=1 $(BIN)/python tests/soak.py --minutes $(MINUTES) --seed $(SEED)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/between.py --programs 1000000 --minutes $(MINUTES) --seed $(SEED)

# many steps with everything on a disk, and many saves; nothing may grow
STEPS ?= 1000
SAVES ?= 1000
lasting: .venv/.installed
	@OMP_NUM_THREADS=1 $(BIN)/python tests/lasting.py --steps $(STEPS)
	@OMP_NUM_THREADS=1 $(BIN)/python tests/lasting_saves.py --saves $(SAVES)

# a training job that is killed and resumed; nothing may be lost or left behind: make killing KILLS=200 SEED=0
KILLS ?= 50
killing: .venv/.installed
	@OMP_NUM_THREADS=1 $(BIN)/python tests/killing.py --kills $(KILLS) --seed $(SEED)

# ranks of components that are killed at random calls; each is named, the run recovers to its bits, nothing is left
killing-components: .venv/.installed
	@OMP_NUM_THREADS=1 $(BIN)/python tests/killing_components.py --kills $(KILLS) --seed $(SEED)

# leaves out each wait in turn, and breaks some other lines; some test must turn red each time
mutants: .venv/.installed
	@$(BIN)/python tests/mutants.py

# every architecture of the installed transformers that a tiny configuration builds, and benchmarks/huggingface.json
hf: .venv/.installed
	@OMP_NUM_THREADS=1 $(BIN)/python tests/huggingface_sweep.py --save huggingface

# benchmarks want an otherwise idle machine; make bench SAVE=--save keeps the tables for docs/benchmarks.md
bench: .venv/.installed
	@echo "== installing the peers (extra bench)"
	@$(PIP) -e '.[bench]'
	@echo "== what a unit costs in Python"
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/overhead.py $(SAVE)
	@echo "== steps beside DDP, FSDP2 and DeepSpeed on two ranks (some minutes)"
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/step.py $(SAVE)
	@echo "== tensor and sequence parallelism beside torch and DeepSpeed on two ranks (some minutes)"
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/axes.py $(SAVE)

# one CUDA device, a GPT of 1.0 billion params in bfloat16
bench-gpu: .venv/.installed
	@$(BIN)/python benchmarks/step.py --device cuda --ranks 1 --dtype bfloat16 \
		--width 2048 --blocks 20 --heads 16 --batch 8 --context 1024

.venv/.installed: .venv/.demo
	@echo "== installing the extras hf, test, dev"
	@$(PIP) -e '.[examples,hf,test,dev]'
	@touch $@

# torch comes first: the pinned version, before any open range can choose another
.venv/.demo: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; say which with: make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "== creating .venv"; $(PYTHON) -m venv .venv; }
	@echo "== installing torch (some minutes on a fresh machine)"
	@$(PIP) torch
	@echo "== installing fzero with the extra examples"
	@$(PIP) -e '.[examples]'
	@touch $@

clean:
	@echo "== removing .venv, out and caches"
	@rm -rf .venv out build dist docs/_build *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
