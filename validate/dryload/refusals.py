"""Messages with which vLLM refuses a checkpoint: the entry that each one means, and what to do.

In: a `LoadFailure`. Out: the first `Refusal` whose words match "<exception>: <message> [<file:line>]", or None.

Easy to get wrong: order. A general exception (KeyError, AssertionError) comes after every message that says more.
Source: met in vLLM 0.32.0, each by a broken checkpoint of tests/helpers/broken.py or tests/helpers/dry_corpus.py.
"""

import re
from dataclasses import dataclass

from ..facts.dry_load import LoadFailure

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One way of refusing.

    Attributes:
        words: regular expression.
        where: the entry that it means, with groups of `words` filled in; "" for the tensor that vLLM was reading.
            {count} is config.json's key for the number of MTP layers.
        cure: what to do.
    """

    words: str
    where: str = ""
    cure: str


_UNNAMED = "Make config.json's ignore list and targets say what the files hold, in vLLM's runtime names"
_SHARDS = "Put all parts of the fused module, or its fused name, on the same list"
_GRAFT = "Bring the MTP block back from the release: `keepmtp graft PATH --from RELEASE --out NEW`"
_SIZES = "config.json's sizes are another model's, or the tensor was cut: compare both with the release"
_COUNT = "Set it to the number of MTP layers on disk; 0 does not switch MTP off"

FOR_AMD = (
    "It is a build for AMD's GPUs, and vLLM prepares such experts for their kernels alone: take a build in NVFP4 or "
    "FP8, or quantize the release"
)

REFUSALS = (
    Refusal(
        words=r"DefaultCPUAllocator|MemoryError|Cannot allocate memory",
        cure="The dry load itself wanted this memory, which is no fault of the checkpoint: report it to keepmtp's "
        "authors, and check with --static-only until then",
    ),
    Refusal(words=r"ZeroDivisionError: .*\[vllm/config/speculative", where="{count}", cure=_COUNT),
    Refusal(
        words=r"AttributeError: '\w+' object has no attribute '(num_nextn_predict_layers|mtp_num_hidden_layers|"
        r"num_mtp_layers|num_mtp_modules)'",
        where=r"\1",
        cure=_COUNT,
    ),
    Refusal(
        words=r"num_speculative_tokens:? ?\d* ?must be divisible by n_predict",
        where="{count}",
        cure="Choose -k as a multiple of the MTP layers",
    ),
    Refusal(
        words=r"AttributeError: '\w*Config' object has no attribute '(\w+)'",
        where=r"\1",
        cure="Take the key from the release's config.json",
    ),
    Refusal(
        words=r"validate_layer_type|number of layer types", where="layer_types", cure="Cut it to the decoder layers"
    ),
    Refusal(
        words=r"model type `(\w+)` but Transformers does not recognize",
        where="model_type",
        cure="Keep auto_map from the release, correct model_type, or use a vLLM that knows it",
    ),
    Refusal(
        words=r"Model architectures \[.*?\] (are not|failed)|no vLLM implementation",
        where="architectures",
        cure="Take architectures from the release's config.json, or use a vLLM that knows it",
    ),
    Refusal(words=r"Weight files referenced in index but missing", where=INDEX, cure="Download it, or mend the index"),
    Refusal(
        words=r"mrope\.py:\d+\]", where="mrope_section", cure="Its sum must be head_dim * partial_rotary_factor / 2"
    ),
    Refusal(
        words=r"The export key should be included in the configurations of Quark",
        where="quantization_config",
        cure="Complete it as its tool writes it",
    ),
    Refusal(
        words=r"Cannot find any of \['(\w+)'", where=r"quantization_config.\1", cure="Complete it as its tool writes it"
    ),
    Refusal(words=r"ModelOpt currently only supports: \[", where="quant_algo", cure="Choose one of vLLM's algorithms"),
    Refusal(
        words=r"MIXED_PRECISION quant_algo requires a non-empty",
        where="quantized_layers",
        cure="List every quantized layer with its algorithm",
    ),
    Refusal(
        words=r"requires the following fields in hf_quant_config\.json: \[?'?(\w+)",
        where=r"\1",
        cure="Add the missing fields to hf_quant_config.json",
    ),
    Refusal(
        words=r"MTP speculative decoding layer \d+ weights missing",
        cure=_GRAFT,
    ),
    Refusal(
        words=r"Following weights were not initialized from checkpoint",
        cure=_GRAFT,
    ),
    Refusal(
        words=r"different quantization schemes for the shards of|some but not all shards of|"
        r"All MoE projections need|Mixed quant_algo within fused layer",
        cure=_SHARDS,
    ),
    Refusal(
        words=r"'NoneType' object has no attribute 'num_bits'|only format: pack-quantized|is_static_input_scheme",
        where="input_activations",
        cure="Set input_activations: dynamic FP8 beside FP8 weights",
    ),
    Refusal(
        words=r"_to_scalar|shape '\[\]' is invalid for input of size \d+",
        cure="modelopt's FP8 by channel or block has no form for routed experts: FP8 a tensor, or MIXED_PRECISION",
    ),
    Refusal(
        words=r"not divisible by|is not divisible|must be divisible|output_partition_size",
        cure="Serve with a smaller --tensor-parallel-size, or keep this module in BF16",
    ),
    Refusal(
        words=r"No valid attention backend found.*?kv_cache_dtype=(?!auto)",
        where="kv_cache_scheme",
        cure="No attention kernel of this GPU takes this KV cache: serve with --kv-cache-dtype bfloat16",
    ),
    Refusal(
        words=r"No valid attention backend found|no valid sparse MLA backend",
        where="config.json",
        cure="No attention kernel of this GPU fits the model, however it is quantized: serve it on a newer GPU",
    ),
    Refusal(words=r"requires amd-quark package", cure=FOR_AMD),
    Refusal(
        words=r"[Ff]ailed to find a kernel|No \w+ .*backend|Unsupported .*backend",
        cure="Choose a scheme that this GPU has a kernel for",
    ),
    Refusal(
        words=r"Attempted to load weight|exceeds dimension size|broadcast shape|parameter\.py:\d+\]|size mismatch",
        cure=f"{_SIZES}; or its form is not what config.json promises for the module",
    ),
    Refusal(
        words=r"weight_packed|weight_scale|w13_|w2_|There is no module or parameter named|KeyError",
        cure=f"{_UNNAMED}, or give the tensor the name that the release has",
    ),
)


def known_refusal(failure: LoadFailure) -> tuple[str, str] | None:
    """(where, cure) of the first refusal that matches; the caller replaces {count} in `where`."""
    text = f"{failure.type}: {' '.join(failure.words.split())} [{failure.at}]"
    for refusal in REFUSALS:
        if match := re.search(refusal.words, text):
            return match.expand(refusal.where) if refusal.where else "", refusal.cure
    return None
