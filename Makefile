# Two commands for a fresh clone: `make demo` and `make test`.
PYTHON ?= python3
PY := .venv/bin/python
# A machine that already has a CUDA torch keeps it; any other gets the pinned CPU build.
HAS_CUDA_TORCH := $(shell $(PYTHON) -c "import torch; print(int(torch.cuda.is_available()))" 2>/dev/null)
ifeq ($(HAS_CUDA_TORCH),1)
VENV_OPTIONS := --system-site-packages
CONSTRAINTS :=
else
VENV_OPTIONS :=
CONSTRAINTS := -c constraints/cpu.txt
endif
PIP := $(PY) -m pip --disable-pip-version-check --no-input -qq

.PHONY: demo test layouts lint clean

demo: .venv/installed .cache/ops  ## train the demo on real text, to a finished run
	@$(PY) -m aah_dist.demo $(ARGS)

test: .venv/installed-dev .cache/ops  ## everything that a CPU machine can check
	@$(PY) -m pytest -q $(ARGS)

layouts: .venv/installed-dev .cache/ops  ## that windows are the same in all layouts of up to 4 ranks, not only in ten
	@LAYOUTS=full $(PY) -m pytest -q tests/test_layouts.py $(ARGS)

lint: .venv/installed-dev
	@$(PY) -m ruff check .

.venv/installed: setup.cfg pyproject.toml constraints/cpu.txt
	@echo "installing into .venv (about two minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV_OPTIONS) .venv
	@$(PIP) install $(CONSTRAINTS) -e .
	@touch $@

.venv/installed-dev: .venv/installed
	@echo "installing test tools into .venv ..."
	@$(PIP) install $(CONSTRAINTS) -e '.[dev,mpi]'
	@touch $@

.cache/ops: .venv/installed
	@$(PY) -m aah_dist.parallel.ops
	@touch $@

clean:  ## remove what was installed and built; runs and data stay
	rm -rf .venv .cache
