# Every target builds in .venv first, where anything changed: .ci/setup. `make demo ARGS=--quick` and `make bench ARGS="rows --list"` hand
# arguments on; `make tables` writes every table and figure of the docs from the committed records, and docs/api.md from the docstrings.
SOURCES := CMakeLists.txt setup.py pyproject.toml requirements.txt .ci/setup $(shell find csrc -type f)
# Processes that run tests; the memory of a GPU allows more than two.
WORKERS ?= 2
.PHONY: demo test bench tables docs lint house sass sanitize wheel

demo: .venv/built ; .venv/bin/python -m flash_online demo $(ARGS)
test: .venv/built ; .venv/bin/python -m pytest --timeout 300 -n $(WORKERS) --dist worksteal $(or $(ARGS),-m "not slow and not nightly")
bench: .venv/built ; .venv/bin/python -m flash_online bench $(or $(ARGS),rows)
tables: .venv/built ; .venv/bin/python -m flash_online bench docs && .venv/bin/python docs/api_page.py
# The pages as a site, in build/docs; a link that leads nowhere is an error. It takes Python 3.11.5 or newer.
docs: .venv/built ; NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build $(ARGS)
lint: .venv/built ; .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/clang-format --dry-run -Werror $$(find csrc tests/unit/device_on_host -type f -not -name '*.in' -not -name '*.pyc') $$(find benchmarks -name '*.cu')
house: .venv/built ; .venv/bin/python .ci/house.py
# make sanitize ARGS="--tool racecheck --calls softmax": the CUDA kernels under compute-sanitizer, on a machine with a GPU.
sanitize: .venv/built ; .venv/bin/python tests/gpu/sanitize.py $(ARGS)
# The wheel of a release, in dist/: every architecture, over half an hour on two cores. `TORCH_CUDA_ARCH_LIST=9.0a make wheel`: one, a quarter of an hour.
wheel: .venv/built ; .ci/wheel
# make sass: the mainloops of the library, and their limits. ARGS="BEFORE AFTER": two build folders, function by function.
sass: ; $(if $(ARGS),.ci/machine_code.py $(ARGS),.ci/mainloops.py flash_online/libflash_online.so)

.venv/built: $(SOURCES) ; .ci/setup .venv && touch $@
