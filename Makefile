# Each target does its own set-up in .venv. PYTHON chooses the interpreter (3.11 or newer).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NPROC ?= 2
CONFIG ?= native_qwen3_debug

.PHONY: install train test lint clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# make prints the command before it runs; it is the same one on trn2 (see README.md).
train: install
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 \
	torchrun --nproc_per_node=$(NPROC) --rdzv_backend c10d --rdzv_endpoint localhost:0 --local-ranks-filter 0 --role rank --tee 3 -m trn_kernels.recipes.train --module trn_kernels.recipes.qwen3 --config $(CONFIG) --override.imports trn_kernels.overrides

test: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) outputs assets build *.egg-info
