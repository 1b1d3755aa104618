# What the README names. Everything is installed into .venv, so a clone needs only Python >= 3.10, git and make.
PYTHON ?= python3
BIN = .venv/bin
# The tests start hundreds of processes. Without .pyc files each of them would compile our modules again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: train test test-all mutate bench machine-code lint docs wheel clean

train: .venv/examples  ## train a character LSTM on Python's documentation
	$(BIN)/python examples/char_lm.py

test: .venv/test lint  ## the tests; a skipped one fails the run, and on Linux a line of metal/ that did not run
	$(BIN)/python -m pytest -n auto --dist worksteal --no-skips --shader-coverage -q

test-all: .venv/test lint  ## the tests, the heavier sweeps, and on Linux the tests on a simulated Mac
	$(BIN)/python -m pytest -n auto --dist worksteal --no-skips --shader-coverage -q -m ""
	test "$$(uname)" = Darwin || \
		PYTHONPATH=tests $(BIN)/python -m pytest -p simulated_mac -n auto --dist worksteal --no-skips -q

mutate: .venv/test  ## plant N small errors in the lines changed since a commit, print those that no test notices; RECORD=1 first
	PYTHONPATH=tests $(BIN)/python -m mutation --since $(or $(SINCE),HEAD~1) --number $(or $(N),20) --seed $(or $(SEED),0) $(if $(RECORD),--record)

bench: .venv/test  ## ours against mlx.nn.LSTM and torch
	$(BIN)/python -m mlx_lstm.bench

machine-code: .venv/test  ## the table of our kernels' instructions, by Mesa's compiler for Apple's GPUs (Debian 12)
	tests/machine_code/build.sh
	PYTHONPATH=tests $(BIN)/python -m machine_code

lint: .venv/test  ## style, the floors of CONTRIBUTING.md, security, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python tests/typed.py

docs: .venv/docs  ## the site, into build/docs; a warning fails it
	$(BIN)/sphinx-build -W --keep-going -q -d build/doctrees docs build/docs
	@echo "The site is build/docs/index.html"

wheel: .venv/test
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean:
	rm -rf .venv build dist

# One marker per extra: installed again when pyproject.toml changes. Off Linux the extra `cpu` installs nothing.
.venv/%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "mlx-lstm needs Python 3.10 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,$*]'
	touch $@
