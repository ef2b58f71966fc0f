# `make demo` and `make test` do everything on a fresh machine: they need Python 3.11 or newer, and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Tests compute small products: more threads would only slow each other down.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup
SOURCES := pyproject.toml CMakeLists.txt $(wildcard kernels/cpu/*.c* kernels/cpu/*.h kernels/cpu/CMakeLists.txt)

MINUTES ?= 10
SEED ?= 0
COUNT ?= 30

.PHONY: demo test test-slow fuzz faults branches costs docs lint format clean metal

demo: $(VENV)/.demo metal
	$(BIN)/afm-mlx generate --prompt "Make this formal:\nhey Hana, can't make it to the Film Lecture"

test: $(VENV)/.test metal
	@echo "The tests take some 5 minutes on two idle cores, and another minute the first time."
	$(PYTEST)

# Coding agents run where npm has installed them (codex, claude, opencode on the PATH), and so does its `ollama`.
test-slow: $(VENV)/.test $(VENV)/.clients metal
	$(PYTEST) -m slow

# Repeats the tests with fresh seeds and ten times the hostile inputs for MINUTES. A failure prints the command that
# repeats it.
fuzz: $(VENV)/.test
	@end=$$(( $$(date +%s) + 60 * $(MINUTES) )); \
	while seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); do \
		AFM_TEST_SEED=$$seed AFM_HOSTILE_CASES=20000 $(PYTEST) -q || exit 1; \
		[ $$(date +%s) -lt $$end ] || break; \
	done

# Puts small faults into the source and shows which test finds each: make faults SEED=7 COUNT=10
faults: $(VENV)/.test
	$(BIN)/python tests/faults.py --seed $(SEED) --count $(COUNT)

# Lists conditions, loops and minima of the Metal kernels that no test takes both ways.
branches: $(VENV)/.test
	rm -rf build/branches
	AFM_METAL_BRANCHES=$(CURDIR)/build/branches $(PYTEST) tests/kernels/metal
	$(BIN)/python -m tests.metal.branches build/branches

# After a change of a Metal kernel: counts the operations that `python -m bench.predict` needs, and writes the
# tables of docs/benchmarks.md that follow from them.
costs: $(VENV)/.test
	$(BIN)/python -m tests.metal.prediction_data

# The documents as a site, build/site/index.html; a broken link or anchor is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --clean

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python .ci/lint_words.py
	$(BIN)/python .ci/lint_package.py
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml .github/ISSUE_TEMPLATE/report.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf build dist $(VENV)

metal:
	@[ "$$(uname -s)" = Darwin ] || echo "No Metal on $$(uname -s): everything runs on MLX's CPU backend."

# uv is several times faster than pip; `make UV= TARGET` does without it. If uv fails, for instance because an index
# is configured for pip only, pip takes over.
UV ?= $(shell command -v uv 2>/dev/null)
INSTALL = $(if $(UV),$(UV) pip install --python $(BIN)/python --compile-bytecode --editable $(1) || )\
	$(BIN)/python -m pip install --disable-pip-version-check --editable $(1)
COMMA := ,
INSTALLING := Installing into $(VENV): a minute or two, including the build of the CPU kernels.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try make PYTHON=python3.12 TARGET" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp per set of dependencies; each is redone when the project's own files change.
$(VENV)/.demo: $(BIN)/python $(SOURCES)
	@echo "$(INSTALLING)"
	$(call INSTALL,.)
	@touch $@

$(VENV)/.test: $(BIN)/python $(SOURCES)
	@echo "$(INSTALLING)"
	$(call INSTALL,".[test]")
	@touch $@

# Client programs of the server need other versions of packages that tests need, so they have their own environment.
CLIENTS := tests/afm_mlx/server/clients/requirements.txt
$(VENV)/.clients: $(BIN)/python $(CLIENTS)
	@echo "Installing clients of the server into $(VENV)/clients: a minute or two, 480 MB."
	$(BIN)/python -m venv $(VENV)/clients
	$(VENV)/clients/bin/python -m pip install --quiet --disable-pip-version-check --requirement $(CLIENTS)
	@touch $@

$(VENV)/.lint: $(BIN)/python $(SOURCES)
	@echo "$(INSTALLING)"
	$(call INSTALL,".[test$(COMMA)lint]")
	@touch $@

$(VENV)/.docs: $(BIN)/python $(SOURCES)
	@echo "$(INSTALLING)"
	$(call INSTALL,".[docs]")
	@touch $@
