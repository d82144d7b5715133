# Every target builds in .venv first, where anything changed: .ci/setup. `make demo ARGS=--quick` hands arguments on.
SOURCES := CMakeLists.txt setup.py pyproject.toml requirements.txt .ci/setup $(shell find csrc -type f)
.PHONY: demo test bench lint

demo: .venv/built ; .venv/bin/python -m flash_online demo $(ARGS)
test: .venv/built ; .venv/bin/python -m pytest --timeout 900 $(ARGS)
bench: .venv/built ; .venv/bin/python -m flash_online bench $(ARGS)
lint: .venv/built ; .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/clang-format --dry-run -Werror $$(find csrc -type f) benchmarks/paper/*.cu

.venv/built: $(SOURCES) ; .ci/setup .venv && touch $@
