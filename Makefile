# Two commands do everything on a machine with Python 3.11: `make artifact` and `make test`.
PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: test test-all lint format blender clean

$(STAMP): requirements.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

test: $(STAMP)
	$(PY) -m pytest

test-all: $(STAMP) blender
	$(PY) -m pytest -m "slow or not slow"

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Blender as a Python module needs numpy<2, so it lives in an environment of its own.
blender: .venv-blender/.installed

.venv-blender/.installed:
	test -x .venv-blender/bin/python || $(PYTHON) -m venv .venv-blender
	.venv-blender/bin/python -m pip install --quiet --disable-pip-version-check bpy==4.5.15
	touch $@

clean:
	rm -rf $(VENV) .venv-blender out
