# make demo    install into .venv and see it work on this machine: measure, plan, train and compare (a few minutes)
# make test    every property once, as continuous integration runs them (9 to 19 minutes on two cores)
# make streams what only a GPU would show and takes long on CPU ranks: compiled fusions, userbuffers, the dry run of the GPU check
# make long    the same properties in more layouts, models and releases; launches that compile, or that take a minute each
# make quick   what needs no ranks, and a handful that does: a few minutes, for while you write (the other releases are not tried)
# make bridge  Megatron-Bridge 0.5 and 0.6 under plans, in an environment of its own (build/bridge, a few GB of packages)
# make fuzz    drawn jobs under drawn and planned plans against stock, for five minutes; FUZZ="--seed 17" repeats one (tests/fuzz)
# make faults  does the suite see what it is there for? Puts faults into a copy of the package, one by one (tests/faults)
# make check   style and types (make lint), pages
# make docs    a site of the documentation in build/site, read without a network
# make clean   remove what was built (.venv stays)
#
# Needs Python >= 3.10 and a way to reach packages; pip's own settings (PIP_INDEX_URL, ...) are respected.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BRIDGE_BASE ?= $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(PYTHON))
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --no-input --quiet
TORCH  := torch==2.13.0
DEMO   := build/demo
OTHERS := 0.15.3 0.17.1 0.18.2 0.19.2
TE_RELEASES := 2.4.0 2.9.0 2.14.1 2.17.1 2.20.2
BRIDGES := 0.5.1 0.6.2

FOLDERS := $(foreach release,$(OTHERS),MEGATRON_CORE_$(subst .,_,$(basename $(release)))_DIR=build/megatron-core-$(release)) \
	$(foreach release,$(TE_RELEASES),TRANSFORMER_ENGINE_$(subst .,_,$(basename $(release)))_DIR=build/transformer-engine-$(release))

# Two processes of tests side by side: most tests have one rank, or ranks that wait for each other; a third gains nothing on two cores.
# Files stay whole, so that what a file's tests share is made once; those that take longest come first (tests/conftest.py).
SIDE_BY_SIDE := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test long streams bridge fuzz faults releases quick check lint docs clean

demo: $(VENV)/installed
	$(BIN)/megatron-lynx profile jobs/demo -o $(DEMO)/profile.yaml
	$(BIN)/megatron-lynx plan jobs/demo --profile $(DEMO)/profile.yaml -o $(DEMO)/plan.yaml
	$(BIN)/megatron-lynx compare jobs/demo --plan $(DEMO)/plan.yaml -o $(DEMO) --rounds 3
	@echo "Open $(DEMO)/report.html in a browser, or $(DEMO)/trace.json at https://ui.perfetto.dev"

test: releases
	$(FOLDERS) $(BIN)/python -m pytest -m "not streams and not long" $(SIDE_BY_SIDE)

long: releases
	$(FOLDERS) $(BIN)/python -m pytest -m long --hypothesis-profile drawn $(SIDE_BY_SIDE)

streams: releases
	$(FOLDERS) $(BIN)/python -m pytest -m "streams and not long" $(SIDE_BY_SIDE)

bridge: releases build/bridge/installed $(BRIDGES:%=build/megatron-bridge-%/downloaded)
	$(FOLDERS) BRIDGE_PYTHON=$(CURDIR)/build/bridge/bin/python $(foreach release,$(BRIDGES),\
		BRIDGE_$(subst .,_,$(basename $(release)))_DIR=build/megatron-bridge-$(release)) $(BIN)/python -m pytest tests/launch/test_bridge.py

fuzz: releases
	$(FOLDERS) $(BIN)/python -u -m tests.fuzz $(FUZZ)

faults: releases
	$(FOLDERS) $(BIN)/python -u -m tests.faults

releases: $(VENV)/installed $(OTHERS:%=build/megatron-core-%/downloaded) $(TE_RELEASES:%=build/transformer-engine-%/downloaded)

# Tests are skipped where they would start a rank, unless they are marked `quick`; those marked `slow` are skipped, too.
quick: $(VENV)/installed
	$(BIN)/python -m pytest --quick -r fE -m "not streams and not long" $(SIDE_BY_SIDE)

check: lint
	$(BIN)/python -m pytest -q tests/test_pages.py tests/test_prose.py tests/test_readme.py

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/installed build/docs/installed
	$(BIN)/python -m scripts.make_site
	NO_MKDOCS_2_WARNING=1 build/docs/bin/mkdocs build --quiet --strict --config-file build/mkdocs.yml
	@echo "Open build/site/index.html; its search needs a server: python3 -m http.server --directory build/site"

build/docs/installed:
	$(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip install --no-input --quiet 'mkdocs-material>=9,<10'
	touch $@

# Torch first and pinned: the tests compare bits, and whatever asks for torch later is content with it.
$(VENV)/installed: setup.py megatron_lynx/version.py Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --editable '.[test]'
	touch $@

# Other releases, beside the installed one. Their tests say why they are skipped where these cannot be had.
# Wheels from 0.17 on are for Python 3.12; what is needed of them is Python alone, so they are only unpacked.
build/megatron-core-%/downloaded: | $(VENV)/installed
	-$(BIN)/python -m pip download --no-input --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest $(@D) \
		megatron-core==$* && $(BIN)/python -m zipfile -e $(@D)/*.whl $(@D) && touch $@

# Transformer Engine's Python, without what is compiled (1 MB each); tests/instruments/transformer_engine runs it on a CPU.
build/transformer-engine-%/downloaded: | $(VENV)/installed
	-$(BIN)/python -m pip download --no-input --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest $(@D) \
		transformer_engine==$* && $(BIN)/python -m zipfile -e $(@D)/*.whl $(@D) && touch $@

# Bridge's wheels ask for Python 3.12 and for packages that need a GPU. What it and its recipes import where there is none is less, and
# where no 3.12 is, any Python of ours does.
build/megatron-bridge-%/downloaded: | $(VENV)/installed
	$(BIN)/python -m pip download --no-input --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest $(@D) \
		megatron-bridge==$* && $(BIN)/python -m zipfile -e $(@D)/*.whl $(@D) && touch $@

build/bridge/installed: | $(VENV)/installed
	$(BRIDGE_BASE) -m venv build/bridge
	build/bridge/bin/python -m pip install --no-input --quiet $(TORCH)
	build/bridge/bin/python -m pip install --no-input --quiet transformers==5.12.1 'hydra-core>=1.3.2,<1.4' omegaconf einops tensorboard \
		rich six regex tqdm requests peft accelerate datasets megatron-energon nvidia-modelopt diffusers
	build/bridge/bin/python -m pip install --no-input --quiet --editable .
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
