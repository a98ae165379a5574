# The verbs of this repository; `make help` lists them.
# Needs python3 (3.10 or newer, with venv and headers), g++, make and git; everything else is installed into .venv.

.DEFAULT_GOAL := help
.PHONY: help run setup test vulkan parity bench fuzz lint clean

PYTHON ?= python3
PY     := .venv/bin/python
PIP    := PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip
# what an editable install compiles, and the packages it knows by name
INSTALL_FROM := pyproject.toml CMakeLists.txt $(wildcard native/* native/*/* qwen3next_ggml/*/__init__.py)

PROMPT      ?= To be, or not to be
# one test process per core; a file's tests stay together, so that what they share is made once
PYTEST_ARGS ?= -q -n auto --dist loadfile
# the page of `qgraph graph` is tried in a real browser where there is one; .ci/run installs it
BROWSER := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
BENCH_ARGS  ?=

# a second device for the tests: Vulkan in software, over the libggml of an npm package
VULKAN_VERSION := 3.22.1
VULKAN_SHA256  := e10577190fc4bd1649d3b655588e5c7a85fc6b6dbf7136fee596cbe9e25521e7
VULKAN_GGML    := .venv/vulkan/package/bins/linux-x64-vulkan
LAVAPIPE := $(firstword $(wildcard /usr/share/vulkan/icd.d/lvp_icd*.json))
# without any of these the part over Vulkan is left out; .ci/run installs them
VULKAN := $(if $(shell command -v npm),$(if $(wildcard /usr/lib/x86_64-linux-gnu/libvulkan.so.1),$(LAVAPIPE)))
# without float16, which rounds operands (docs/backends.md); glibc would give the driver's memory back to the system and take it again for
# every row of a norm; compiled shaders are kept
VULKAN_ENV := QGRAPH_GGML='$(CURDIR)/$(VULKAN_GGML)' GGML_VK_VISIBLE_DEVICES=0 GGML_VK_DISABLE_F16=1 VK_ICD_FILENAMES=$(LAVAPIPE) \
	MESA_SHADER_CACHE_DIR='$(CURDIR)/.venv/vulkan/shaders' MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296

help: ## list the verbs
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1|\2/p' Makefile | awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'

run: .venv/installed ## install, then let the embedded model go on from PROMPT="…"
	.venv/bin/qgraph run -p "$(PROMPT)" -n 96

setup: .venv/installed-test ## install with everything the tests need (builds llama-cpp-python once, about 6 minutes)

test: .venv/installed-test $(if $(VULKAN),.venv/vulkan/$(VULKAN_VERSION)) ## run the whole suite over each libggml, and what a second device can show over Vulkan
	@status=0; \
	[ -n "$(BROWSER)" ] || echo "no Chromium: tests/test_graph_html.py is left out (apt-get install chromium)"; \
	for provider in ggml_python llama_cpp; do \
		echo "== tests over $$provider"; \
		QGRAPH_GGML=$$provider $(PY) -m pytest $(PYTEST_ARGS) --junitxml=.venv/report-$$provider.xml \
			$(if $(BROWSER),,--ignore=tests/test_graph_html.py) tests || status=1; \
	done; \
	if [ -n "$(VULKAN)" ]; then \
		echo "== tests over vulkan"; \
		$(VULKAN_ENV) $(PY) -m pytest $(PYTEST_ARGS) --junitxml=.venv/report-vulkan.xml tests/vulkan tests/ggml/test_warm_threads.py || status=1; \
	else \
		echo "no npm or no software Vulkan: tests/vulkan is left out (apt-get install npm libvulkan1 mesa-vulkan-drivers)"; \
	fi; exit $$status

vulkan: .venv/installed-test .venv/vulkan/$(VULKAN_VERSION) ## run the tests of a second device alone, on Vulkan in software
	$(VULKAN_ENV) $(PY) -m pytest $(PYTEST_ARGS) tests/vulkan tests/ggml/test_warm_threads.py

parity: .venv/installed-test ## compare every node and the text with llama.cpp, same libggml on both sides
	QGRAPH_GGML=llama_cpp $(PY) -m pytest $(PYTEST_ARGS) tests/test_against_llama.py tests/test_parity.py

bench: .venv/installed-test ## measure against llama.cpp, interleaved, 15 GiB of files in a cache; BENCH_ARGS="--rows decode …"
	$(PY) -m benchmarks.vs_llama $(BENCH_ARGS)

fuzz: .venv/installed-test ## run the property tests with many more examples
	HYPOTHESIS_PROFILE=fuzz $(PY) -m pytest $(PYTEST_ARGS) -m hypothesis tests

lint: .venv/installed-lint ## check the style of the Python files
	$(PY) -m ruff check --select E4,E7,E9,F .

clean: ## remove .venv and everything built
	rm -rf .venv build dist .pytest_cache .hypothesis

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "python3 is $$($(PYTHON) -V), 3.10 or newer is needed: make PYTHON=python3.11 …" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' \
		|| { echo "python3 has no venv: apt-get install python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' \
		|| { echo "Python.h is missing: apt-get install python3-dev" >&2; exit 1; }
	@command -v $${CXX:-g++} >/dev/null || { echo "no C++ compiler: apt-get install g++" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	@touch $@

.venv/vulkan/$(VULKAN_VERSION): .venv/made
	@rm -rf .venv/vulkan/package .venv/vulkan/*.tgz && mkdir -p .venv/vulkan/shaders
	cd .venv/vulkan && npm pack --loglevel=error @node-llama-cpp/linux-x64-vulkan@$(VULKAN_VERSION) > /dev/null
	@echo "$(VULKAN_SHA256)  $$(ls .venv/vulkan/*.tgz)" | sha256sum --check --quiet
	@tar xzf .venv/vulkan/*.tgz -C .venv/vulkan package/bins package/LICENSE && rm .venv/vulkan/*.tgz
	@touch $@

.venv/installed: .venv/made $(INSTALL_FROM)
	$(PIP) install -q -e .
	@touch $@

.venv/installed-test: .venv/made $(INSTALL_FROM)
	$(PIP) install -q -e '.[test,parity]'
	@touch .venv/installed $@

.venv/installed-lint: .venv/made
	$(PIP) install -q ruff
	@touch $@
