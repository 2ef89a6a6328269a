# Two commands: `make verify` (judge everything on this machine; leaves verify.html) and `make test` (tests, lint, types).
# Both work in a fresh clone with nothing but Python 3.11 or newer; the plain commands stand in README.md.
#
#   TORCH=cpu    torch's CPU build, without the gigabytes of CUDA libraries that the published one brings on Linux;
#                any other word that `uv pip install --torch-backend` knows: cu130, auto, ...
#   PYTHON=...   another interpreter than the first of python3, python3.13, ... that is new enough
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' 2> /dev/null && echo $$python && break; done)
VENV := .venv
TORCH ?=
ifneq ($(TORCH),)
export UV_TORCH_BACKEND := $(TORCH)
endif
UV := $(VENV)/bin/python -m uv pip install --python $(VENV) -c constraints.txt

.PHONY: verify test matrix lock vendor vendor-libraries mutants pages clean

$(VENV)/bin/uv: constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer is on the PATH; name one with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt uv
	touch $@

$(VENV)/.installed: $(VENV)/bin/uv pyproject.toml constraints.txt
	$(UV) setuptools
	$(UV) --no-build-isolation -e .
	touch $@

verify: $(VENV)/.installed
	$(VENV)/bin/fp8-oracle verify --html verify.html

$(VENV)/bin/tox: $(VENV)/bin/uv
	$(UV) tox tox-uv
	touch $@

test: $(VENV)/bin/tox
	$(VENV)/bin/tox run

# Every cell that this machine can run, and one page of all: Python x torch x mode.
matrix: $(VENV)/bin/tox $(VENV)/.installed
	rm -rf build/matrix
	$(VENV)/bin/python -m tests.support.matrix unsupported build/matrix
	-PATH="$$($(VENV)/bin/python -m tests.support.matrix path):$$PATH" $(VENV)/bin/tox run -e "$$($(VENV)/bin/python -m tests.support.matrix cells --here)"
	$(VENV)/bin/python -m tests.support.matrix page build/matrix --html matrix.html --markdown matrix.md

# Exact versions for Linux on x86-64 and aarch64, Python 3.11 to 3.14. Versions that constraints.txt has are kept where
# they fit: remove a line, or write another version into it, and the rest follows.
lock: $(VENV)/bin/uv
	$(VENV)/bin/uv pip compile --universal --python-version 3.11 --extra dev --extra docs --extra mutants --no-annotate \
	    --no-header --quiet pyproject.toml --output-file constraints.txt
	sed -i "s/ ; python_full_version < '3.15' and sys_platform == 'linux'$$//" constraints.txt

# The C++ examples of an exported folder under ctest, with GoogleTest and Catch2 where they are installed; needs CMake.
vendor: $(VENV)/.installed
	rm -rf build/vendor build/vendor-examples
	mkdir -p build
	$(VENV)/bin/fp8-oracle fixtures export build/vendor --contract fp8_gemm_nt
	cmake -S build/vendor/examples -B build/vendor-examples
	cmake --build build/vendor-examples
	ctest --test-dir build/vendor-examples -L fp8_golden --output-on-failure

# On Debian and Ubuntu.
vendor-libraries:
	sudo apt-get update
	sudo apt-get install -y libgtest-dev catch2

# Every mutant of the rooms that decide, against the tests of their files; SAMPLE=80 for so many of them, ROOMS for some.
mutants: $(VENV)/.installed
	$(UV) '.[dev,mutants]'
	OMP_NUM_THREADS=1 PYTHONPATH=. $(VENV)/bin/python tests/support/mutation.py $(ROOMS) $(if $(SAMPLE),--sample $(SAMPLE))

# The pages of VERSION, beside those of earlier ones, as a commit of the branch gh-pages; nothing is pushed.
pages: $(VENV)/.installed
	@test -n "$(VERSION)" || { echo "name the version: make pages VERSION=0.1.0" >&2; exit 1; }
	$(UV) '.[docs]'
	$(VENV)/bin/mike deploy --update-aliases $(VERSION) latest
	$(VENV)/bin/mike set-default latest

clean:
	rm -rf $(VENV) .tox .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks build dist *.egg-info
