# make demo   set up .venv, download SmolLM2 and ask it a question
# make docs   build the documentation's site into build/site
# make test   set up .venv and run what CI runs: lint, types, tests
# make test-fast  run the tests of the files that differ from main, in a minute; a few of all if none differs
# make test-slow  run the tests that take minutes, also those on the real models of this machine
# make coverage   run the tests of `make test` and fail below the floor of covered lines in pyproject.toml
# make lint   run ruff and mypy
# make arm    download an arm64 Python into build/arm (Debian): the slow tests then run pronk on emulated Arm processors
# make sanitize  build the kernels with the address and undefined-behaviour sanitizers and run their tests
# make wheels build a wheel for every platform, and the source archive, into dist/ (WHEELS="linux-x86_64 sdist": some)
#
# Options:  PYTHON=python3.12   the interpreter that .venv is made with (3.11 or newer)
#           PIP_FLAGS="..."     more arguments for every pip install

.DEFAULT_GOAL := demo
.PHONY: demo docs test test-fast untested lint test-slow coverage arm sanitize wheels clean
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory
# Without bytecode on disk, each process of the tests compiles the package, and pytest rewrites all tests again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PROCESSORS := $(shell getconf _NPROCESSORS_ONLN)
# Some tests wait, for processes or browsers: one more process than processors keeps them busy.
PROCESSES := $(shell echo $$(( $(PROCESSORS) + 1 )))
PY := $(VENV)/bin/python

# A stamp's name carries the checksum of all that the installation depends on, the folder included, so that a
# changed pin or a moved checkout installs again and nothing else does.
KEY := $(shell { pwd; cat pyproject.toml constraints.txt hatch_build.py src/pronk/__init__.py src/pronk/kernels/build.py src/pronk/kernels/csrc/*; } | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(KEY)
INSTALLED_DEV := $(VENV)/.installed-dev-$(KEY)
SANITIZED := build/sanitized/libpronk.so
# ensurepip mends a .venv whose creation was interrupted.
INSTALL := { $(PY) -m pip --version || $(PY) -m ensurepip; } >/dev/null 2>&1; \
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS)

demo: $(INSTALLED)
	@$(VENV)/bin/pronk pull smollm2 >/dev/null
	@echo "> $$(cat examples/question.txt)" >&2
	@$(VENV)/bin/pronk chat --stats --max-tokens 192 --seed 2 <examples/question.txt

# mypy has one thread: meanwhile the compiler builds what the sanitizers test.
test: $(INSTALLED_DEV)
	@$(MAKE) --jobs=2 lint $(SANITIZED) $(REWRITTEN)
	$(PY) -m pytest --numprocesses=$(PROCESSES) --dist=worksteal
	@$(MAKE) sanitize
	@$(MAKE) untested

# Names on standard error what `make test` has skipped on this machine. It installs nothing; .ci/run does.
untested:
	@have() { command -v "$$1" >/dev/null 2>&1; }; \
	have qemu-aarch64 || have qemu-aarch64-static || missing="qemu-user"; \
	have aarch64-linux-gnu-g++ || have zig || missing="$$missing g++-aarch64-linux-gnu"; \
	test -z "$$missing" || echo "make: ARM'S KERNELS WERE NOT TESTED: no emulator or no compiler; apt-get install" $$missing >&2

# pytest rewrites the asserts of all test files when it first imports them, which takes 10 s of processor time. In a new
# clone one process does it, and stores the bytecode; otherwise each process of the tests would. Errors are those of the
# tests' own run.
REWRITTEN := build/.rewritten
$(REWRITTEN): | $(INSTALLED_DEV)
	@mkdir -p $(@D)
	@$(PY) -m pytest --collect-only >/dev/null 2>&1 || true
	@touch $@

lint: $(INSTALLED_DEV)
	$(PY) -m ruff check --quiet .
	$(PY) -m ruff format --quiet --check .
	$(PY) -m mypy

test-fast: $(INSTALLED_DEV)
	$(PY) -m ruff check --quiet .
	$(PY) -m pytest $$($(PY) tools/changed_tests.py)

test-slow: $(INSTALLED_DEV)
	$(PY) -m pytest --numprocesses=$(PROCESSES) --dist=worksteal -m slow

coverage: $(INSTALLED_DEV)
	$(PY) -m pytest --numprocesses=$(PROCESSES) --dist=worksteal --cov --cov-report=term

# Both libraries, with every instruction set that the processor has or can emulate; Python itself leaks. These tests
# do not wait, and each further process would import torch.
# The self-check has texts and trees in a layer of latent attention.
SANITIZERS := $(shell ${CXX} -print-file-name=libasan.so 2>/dev/null) $(shell ${CXX} -print-file-name=libubsan.so 2>/dev/null)
$(SANITIZED): Makefile src/pronk/kernels/build.py $(wildcard src/pronk/kernels/csrc/*) | $(INSTALLED_DEV)
	@$(PY) src/pronk/kernels/build.py $@ -Werror -O0 -g1 -DPRONK_FEW_TILES -DPRONK_EMULATE \
		-fsanitize=address,undefined -fno-sanitize-recover=undefined

sanitize: $(SANITIZED)
	ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(SANITIZERS)" $(PY) -m pytest --library=$(SANITIZED) --numprocesses=$(PROCESSORS) --dist=worksteal \
		tests/kernels/test_weights.py tests/kernels/test_blocks.py tests/kernels/test_adapters.py tests/kernels/test_coded.py::test_outputs_equal_the_loop \
		tests/kernels/test_coded.py::test_the_largest_sums_do_not_overflow tests/kernels/test_library.py::test_every_instruction_set_passes_its_self_check \
		tests/kernels/test_choices.py tests/kernels/test_convolutions.py tests/kernels/test_experts.py tests/kernels/test_suffixes.py \
		tests/kernels/test_layer_inputs.py tests/kernels/test_latent_attention.py::test_rows_that_are_not_finite_leave_other_requests_alone \
		tests/kernels/test_latent_attention.py::test_sizes_that_are_no_whole_blocks_are_refused \
		tests/models/test_kernel_batch.py tests/models/test_kv_sources.py::test_trees_of_several_requests \
		tests/models/test_recurrence.py::test_chunks tests/models/test_state_traffic.py \
		tests/drafting/from_text/test_growth.py tests/text/test_score_tokenizer.py \
		tests/drafting/from_target/test_two_stages.py::test_centroids_of_the_file_are_used \
		--deselect tests/kernels/test_choices.py::test_samples_follow_the_softmax_of_the_logits \
		--deselect tests/kernels/test_choices.py::test_samples_equal_numpys

# The site is built from the text of the files alone: pronk itself need not be installed.
docs: | $(PY)
	@$(INSTALL) zensical mkdocstrings-python ruff
	@$(PY) tools/docs/build.py

arm: | $(PY)
	@$(PY) tools/arm_python.py build/arm

wheels: $(INSTALLED_DEV)
	@$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS) build ziglang
	@$(PY) tools/wheels.py $(WHEELS)

clean:
	rm -rf $(VENV) build dist .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache

$(INSTALLED): | $(PY)
	@echo "Installing pronk into $(VENV) ..." >&2
	@export PRONK_KERNELS=native; $(INSTALL) --editable .
	@touch $@

$(INSTALLED_DEV): | $(PY)
	@echo "Installing pronk and its development tools into $(VENV) (the first time fetches torch, about 200 MB) ..." >&2
	@$(INSTALL) --editable '.[dev]'
	@touch $@ $(INSTALLED)

$(PY):
	@set -e; \
	for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python); do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
			"$$python" -m venv --clear $(VENV) && exit 0; \
			rm -rf $(VENV); \
			echo "make: $$python -m venv failed (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; \
		fi; \
		found="$$found $$python ($$("$$python" --version 2>&1 | tail -n 1));"; \
	done; \
	echo "make: expected Python 3.11 or newer, found$$found name another: make PYTHON=/path/to/python3.11" >&2; exit 1
