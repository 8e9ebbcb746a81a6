#!/usr/bin/env bash
# A fine-tune that lost its MTP block, quantized with the block of the model that was fine-tuned, and judged.
#
#     examples/fine_tune.sh ./my-fine-tune zai-org/GLM-4.7 out/mine
#
# A killed run continues when the line is repeated. docs/publishing.md goes on from here: bench, eval, card, upload.
set -euo pipefail
fine_tune=$1
release=$2
out=$3
scheme=${4:-w4a16-fp8}

# What becomes of every tensor, from headers alone.
keepmtp plan "$fine_tune" --mtp-source "$release" --scheme "$scheme"

# This variant needs no calibration text and no GPU.
keepmtp quantize "$fine_tune" --mtp-source "$release" --scheme "$scheme" --out "$out"

# Every scale and norm. With --gpu H100, vLLM's own classes load it too; that needs a vLLM, but no GPU.
keepmtp check "$out" --values
