# Each target does its own set-up in .venv. PYTHON chooses the interpreter (3.11 or newer).
# With another torch: make test-parallel TORCH=2.14.1 VENV=.venv-torch2.14
PYTHON ?= python3
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NPROC ?= 2
CONFIG ?= native_qwen3_debug
FINETUNED := outputs/checkpoint_qwen3_debug_ft
LAUNCH = torchrun --nproc_per_node=$(NPROC) --rdzv_backend c10d --rdzv_endpoint localhost:0 --local-ranks-filter 0 --role rank --tee 3 -m trn_kernels.recipes.train --module trn_kernels.recipes.qwen3

.PHONY: install train finetune test test-parallel lint clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	touch $@

# make prints the command before it runs; it is the same one on trn2 (see README.md).
train: install
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 \
	$(LAUNCH) --config $(CONFIG) --override.imports trn_kernels.overrides

# Weights of Hugging Face in, 5 steps, weights of Hugging Face out; then proof of the export, and plain transformers.
finetune: install
	rm -rf $(FINETUNED)
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 \
	$(LAUNCH) --config v5_qwen3_debug_finetune
	$(BIN)/python -m trn_kernels.recipes.verify export $(FINETUNED)/step-5 --reference assets/debug_qwen3
	cd $(FINETUNED) && "$(CURDIR)/$(BIN)/python" -c 'from transformers import pipeline; print(pipeline("text-generation", "step-5", max_new_tokens=8)("The import statement")[0]["generated_text"])'

test: install
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto

# One step in every layout, against one process; `make test` has a few of them. ROWS='moe ep' chooses those with both words.
test-parallel: install
	$(BIN)/python tests/recipes/matrix.py $(ROWS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) outputs assets build *.egg-info
