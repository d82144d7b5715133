# Every target builds in .venv first, where anything changed: .ci/setup. `make demo ARGS=--quick` and `make bench ARGS="rows --list"` hand
# arguments on; `make tables` writes every table and figure of the docs from the committed records.
SOURCES := CMakeLists.txt setup.py pyproject.toml requirements.txt .ci/setup $(shell find csrc -type f)
# Processes that run tests; the memory of a GPU allows more than two.
WORKERS ?= 2
.PHONY: demo test bench tables lint house wheel sass sanitize

demo: .venv/built ; .venv/bin/python -m flash_online demo $(ARGS)
test: .venv/built ; .venv/bin/python -m pytest --timeout 300 -n $(WORKERS) --dist worksteal $(ARGS)
bench: .venv/built ; .venv/bin/python -m flash_online bench $(or $(ARGS),rows)
tables: .venv/built ; .venv/bin/python -m flash_online bench docs
lint: .venv/built ; .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/clang-format --dry-run -Werror $$(find csrc -type f -not -name '*.in') benchmarks/paper/*.cu tests/unit/device_on_host/*
house: .venv/built ; .venv/bin/python .ci/house.py
# A wheel in dist/, for what this machine has; the environment says otherwise as in README.md.
wheel: .venv/built ; .venv/bin/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist $(ARGS) .
# make sanitize ARGS="--tool racecheck --calls softmax": the CUDA kernels under compute-sanitizer, on a machine with a GPU.
sanitize: .venv/built ; .venv/bin/python tests/gpu/sanitize.py $(ARGS)
# make sass ARGS="BEFORE AFTER": the machine code of two build folders, function by function.
sass: ; .ci/machine_code.py $(ARGS)

.venv/built: $(SOURCES) ; .ci/setup .venv && touch $@
