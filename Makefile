# make demo    install into .venv and see it work on this machine: measure, plan, train and compare (a few minutes)
# make test    every test
# make check   style and types
# make clean   remove what was built (.venv stays)
#
# Needs Python >= 3.10 and a way to reach packages; pip's own settings (PIP_INDEX_URL, ...) are respected.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --no-input --quiet
TORCH  := torch==2.13.0
DEMO   := build/demo
OLD    := build/megatron-core-0.15

.PHONY: demo test check clean

demo: $(VENV)/installed
	$(BIN)/megatron-lynx profile jobs/demo -o $(DEMO)/profile.yaml
	$(BIN)/megatron-lynx plan jobs/demo --profile $(DEMO)/profile.yaml -o $(DEMO)/plan.yaml
	$(BIN)/megatron-lynx compare jobs/demo --plan $(DEMO)/plan.yaml -o $(DEMO)
	@echo "Look at $(DEMO)/timeline.png, or open $(DEMO)/trace.json at https://ui.perfetto.dev"

test: $(VENV)/installed $(OLD)/downloaded
	MEGATRON_CORE_0_15_DIR=$(OLD) $(BIN)/python -m pytest

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Torch first and pinned: the tests compare bits, and whatever asks for torch later is content with it.
$(VENV)/installed: setup.py megatron_lynx/version.py Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --editable '.[test]'
	touch $@

# The release before, beside the installed one. Its smoke test says why it is skipped where this cannot be had.
$(OLD)/downloaded: | $(VENV)/installed
	-$(PIP) --no-deps --target $(OLD) megatron-core==0.15.3 && touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
