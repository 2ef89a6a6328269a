# Two commands: `make verify` (judge everything on this machine; leaves verify.html) and `make test` (tests, lint, types).
# Both work in a fresh clone with nothing but Python 3.11 and pip; the plain commands stand in README.md.
PYTHON ?= python3.11
VENV := .venv

.PHONY: verify test vendor vendor-libraries mutants clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -c constraints.txt setuptools
	$(VENV)/bin/python -m pip install -c constraints.txt --no-build-isolation -e .
	touch $@

verify: $(VENV)/.installed
	$(VENV)/bin/fp8-oracle verify --html verify.html

$(VENV)/bin/tox:
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt tox

test: $(VENV)/bin/tox
	$(VENV)/bin/tox run

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
	$(VENV)/bin/python -m pip install -q -c constraints.txt '.[dev,mutants]'
	OMP_NUM_THREADS=1 PYTHONPATH=. $(VENV)/bin/python tests/support/mutation.py $(ROOMS) $(if $(SAMPLE),--sample $(SAMPLE))

clean:
	rm -rf $(VENV) .tox .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks build dist *.egg-info
