# `make demo` and `make test` need only Python 3.11 (or newer) and make. An environment is made or
# updated only when pyproject.toml or this file has changed.

PYTHON ?= $(firstword $(foreach p,python3.11 python3,$(if $(shell \
	$(p) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(p))))

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

DEMO_STAMP := $(VENV)/.demo

OLDEST := .venv-oldest
OLDEST_STAMP := $(OLDEST)/.installed

FORMATS := .venv-formats
FORMATS_STAMP := $(FORMATS)/.installed

NIGHTLY := .venv-keras-nightly
NIGHTLY_STAMP := $(NIGHTLY)/.installed

NO_TF := .venv-no-tensorflow
NO_TF_STAMP := $(NO_TF)/.installed

COMPAT := .venv-compat
COMPAT_STAMP := $(COMPAT)/.installed

# Installed first and by this exact version: it is the one with a CPU build where this project is
# developed. A looser requirement, or one that another package brings in, fetches gigabytes of CUDA.
TORCH := torch==2.13.0
# Python compiles modules when they are imported; compiling everything installed takes too long.
PIP := -m pip --disable-pip-version-check install -qq --no-compile
# If the environment forbids Python to cache bytecode, each of a hundred processes compiles TensorFlow
# again: six seconds.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-quick test-oldest test-keras-nightly test-compat test-formats test-no-tensorflow \
	test-tensorflow test-jax test-torch test-docs test-faults test-mutants test-wheel lint format clean \
	bench bench-quick figures docs notebooks release-check

help:
	@echo "make demo          a trained network to a small file, beside its dense rivals (examples/quickstart.py)"
	@echo "make test-quick    two minutes, for a first change: lint, short tests on TensorFlow and JAX"
	@echo "make test          lint, docs, a draw of the tests, site, wheel: eleven minutes"
	@echo "make lint          ruff, mypy, tools/words.py, tools/names.py      make format  let ruff rewrite"
	@echo "make test-slow     all tests on all of their backends, the slow ones with them"
	@echo "make test-oldest   the suite on the oldest versions that pyproject.toml allows"
	@echo "make test-keras-nightly  the suite on the Keras of last night"
	@echo "make test-compat   models of keras-hub, keras-rs, keras.applications, keras.io (ARGS=backends)"
	@echo "make test-no-tensorflow  LiteRT files without TensorFlow, on JAX and torch"
	@echo "make test-formats  exports to ONNX, OpenVINO and C arrays, run by their runtimes, on three backends"
	@echo "make test-faults   kills, full disks, damaged files, counted: an hour (ARGS=\"--parts disks\")"
	@echo "make test-mutants  small faults put into the package: do the tests notice? (NAMES=...)"
	@echo "make bench         all tables and pictures anew, into benchmarks/results: days (ARGS=\"--parts deep\")"
	@echo "make bench-quick   a small setting of each, into benchmarks/out/quick: ten minutes"
	@echo "make figures       the figures of README.md and docs/, from benchmarks/results"
	@echo "make docs          the site, into build/site"
	@echo "make notebooks     the tutorials as notebooks with outputs, into build/notebooks (ARGS=--write: and into pages)"
	@echo "make release-check build what is released, and check it (docs/releasing.md)"
	@echo "one part of test:  test-tensorflow  test-jax  test-torch  test-docs  test-wheel"
	@echo "make clean         remove caches and build outputs (not the environments)"

setup: $(STAMP)

$(STAMP): pyproject.toml Makefile
	$(if $(PYTHON),,$(error Python 3.11 or newer is needed; name it with make PYTHON=...))
	@echo "setting up $(VENV) (the first time takes minutes)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) $(PIP) $(TORCH)
	@$(PY) $(PIP) --editable ".[dev]"
	@touch $@

# A third of the packages: the demo needs neither JAX and torch nor the tools.
$(DEMO_STAMP): pyproject.toml Makefile
	$(if $(PYTHON),,$(error Python 3.11 or newer is needed; name it with make PYTHON=...))
	@echo "setting up $(VENV) (the first time takes minutes)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PY) $(PIP) --editable ".[tensorflow,litert,plot]" "scikit-learn>=1.5"
	@touch $@

$(OLDEST_STAMP): pyproject.toml Makefile tools/oldest.py
	$(if $(PYTHON),,$(error Python 3.11 or newer is needed; name it with make PYTHON=...))
	@echo "setting up $(OLDEST) (the first time takes minutes)"
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@$(PYTHON) tools/oldest.py > $(OLDEST)/constraints.txt
	@$(OLDEST)/bin/python $(PIP) --constraint $(OLDEST)/constraints.txt $(TORCH)
	@$(OLDEST)/bin/python $(PIP) --constraint $(OLDEST)/constraints.txt --editable ".[test]"
	@touch $@

# Not in .venv, where `make test` would find the packages and run their tests, too. It sees what
# .venv has, so that only these packages and their own needs are installed.
$(COMPAT_STAMP): $(STAMP)
	@echo "setting up $(COMPAT)"
	@test -x $(COMPAT)/bin/python || $(PY) -m venv $(COMPAT)
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		echo "import site; site.addsitedir('$$($(PY) -c "$$site")')" \
		> "$$($(COMPAT)/bin/python -c "$$site")/venv.pth"
	@$(COMPAT)/bin/python $(PIP) --editable ".[compat]"
	@touch $@

# keras-nightly is the package `keras` under another name: installed in its place.
$(NIGHTLY_STAMP): pyproject.toml Makefile
	$(if $(PYTHON),,$(error Python 3.11 or newer is needed; name it with make PYTHON=...))
	@echo "setting up $(NIGHTLY) (the first time takes minutes)"
	@test -x $(NIGHTLY)/bin/python || $(PYTHON) -m venv $(NIGHTLY)
	@$(NIGHTLY)/bin/python $(PIP) $(TORCH)
	@$(NIGHTLY)/bin/python $(PIP) --editable ".[test]"
	@$(NIGHTLY)/bin/python -m pip uninstall -qq --yes keras
	@$(NIGHTLY)/bin/python $(PIP) --pre keras-nightly
	@touch $@

$(NO_TF_STAMP): pyproject.toml Makefile
	$(if $(PYTHON),,$(error Python 3.11 or newer is needed; name it with make PYTHON=...))
	@echo "setting up $(NO_TF)"
	@test -x $(NO_TF)/bin/python || $(PYTHON) -m venv $(NO_TF)
	@$(NO_TF)/bin/python $(PIP) $(TORCH)
	@$(NO_TF)/bin/python $(PIP) --editable ".[litert-jax,torch]" "hypothesis>=6.100" "pytest>=8.4" \
		"sybil>=9.1"
	@touch $@

# Separate venv: these need newer packages than TFMOT allows.
$(FORMATS_STAMP): $(STAMP)
	@echo "setting up $(FORMATS)"
	@test -x $(FORMATS)/bin/python || $(PY) -m venv $(FORMATS)
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		echo "import site; site.addsitedir('$$($(PY) -c "$$site")')" \
		> "$$($(FORMATS)/bin/python -c "$$site")/venv.pth"
	@$(FORMATS)/bin/python $(PIP) --editable ".[formats]"
	@touch $@

demo: $(DEMO_STAMP)
	@$(PY) examples/quickstart.py $(ARGS)

# What each part runs stands in tools/check.py.
test: $(STAMP)
	@$(PY) tools/check.py

test-quick: $(STAMP)
	@$(PY) tools/check.py lint quick

test-slow: $(STAMP)
	@$(PY) tools/check.py --slow

test-oldest: $(OLDEST_STAMP)
	@PYTEST_ADDOPTS="-W ignore::DeprecationWarning -W ignore::FutureWarning" \
		$(OLDEST)/bin/python tools/check.py tensorflow jax torch

test-keras-nightly: $(NIGHTLY_STAMP)
	@PYTEST_ADDOPTS="-W ignore::DeprecationWarning -W ignore::FutureWarning" \
		$(NIGHTLY)/bin/python tools/check.py tensorflow jax torch

test-compat: $(COMPAT_STAMP)
	@$(COMPAT)/bin/python tools/compatibility.py $(ARGS)

test-formats: $(FORMATS_STAMP)
	@for backend in tensorflow jax torch; do \
		KERAS_BACKEND=$$backend $(FORMATS)/bin/python -m pytest -q \
			tests/compat/test_formats.py tests/compat/test_micro.py || exit 1; done

# LiteRT files where TensorFlow is not installed at all, from JAX and torch.
test-no-tensorflow: $(NO_TF_STAMP)
	@for backend in jax torch; do KERAS_BACKEND=$$backend $(NO_TF)/bin/python -m pytest -q --slow \
		tests/export/test_without_tensorflow.py || exit 1; done

# Kills, full disks, damaged files, threads and memory: docs/faults.md. For the night.
test-faults: $(STAMP)
	@$(PY) -m tests.faults $(ARGS)

# Which faults there are, and which tests should notice, stands in tools/mutants.toml.
test-mutants: $(STAMP)
	@$(PY) tools/mutants.py $(NAMES) $(ARGS)

# What runs, and in which setting, stands in benchmarks/suite.toml.
bench: $(STAMP)
	@$(PY) benchmarks/runner.py $(ARGS)

bench-quick: $(STAMP)
	@$(PY) benchmarks/runner.py --quick $(ARGS)

figures: $(STAMP)
	@$(PY) tools/figures.py

docs: $(STAMP)
	@$(PY) tools/site_check.py build/site

notebooks: $(STAMP)
	@$(PY) tools/notebooks.py build/notebooks --run $(ARGS)

release-check: $(STAMP)
	@$(PY) tools/release.py $(ARGS)

test-docs: $(STAMP)
	@$(PY) tools/check.py docs site

test-tensorflow test-jax test-torch test-wheel: test-%: $(STAMP)
	@$(PY) tools/check.py $*

lint: $(STAMP)
	@$(PY) tools/check.py lint types

format: $(STAMP)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
