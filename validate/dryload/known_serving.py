"""Failures of configs, of the KV cache, of GPUs, of vLLM itself, and of a server that runs and drafts nothing of use.

In: nothing. Out: `SERVING`, in the order in which they are tried.

Easy to get wrong: as in known_loading.py.
"""

from .failure import ALL_VERSIONS, GENERAL, KnownFailure

SERVING: tuple[KnownFailure, ...] = (
    # --- Configs ------------------------------------------------------------------------------------------------------
    KnownFailure(
        name="count of MTP layers missing or zero",
        words=r"ZeroDivisionError: |object has no attribute '(?P<tensor>num_nextn_predict_layers|mtp_num_hidden_layers|"
        r"num_mtp_layers|num_mtp_modules)'",
        sources="M7; F9",
        concerns=ALL_VERSIONS,
        says="config.json does not count the MTP layers; 0 does not switch MTP off",
        cure="Take the key from the release's config.json",
        command="fix",
        rules=("mtp-not-promised", "mtp-missing", "config"),
    ),
    KnownFailure(
        name="drafted tokens and MTP layers",
        words=r"num_speculative_tokens:? ?\d{0,9} ?must be divisible by n_predict",
        sources="vllm/config/speculative.py",
        concerns=ALL_VERSIONS,
        says="vLLM runs the MTP layers in turn, and takes a multiple of their number",
        cure="Set num_speculative_tokens to a multiple of the MTP layers",
    ),
    KnownFailure(
        name="layer_types of the wrong length",
        words=r"validate_layer_type|number of layer types|layer_types.{0,80}(?:length|entries)",
        sources="E5",
        concerns="transformers 5",
        says="layer_types also counts the MTP layers, or was cut",
        cure="Cut it to the decoder layers",
        command="fix",
        rules=("config",),
    ),
    KnownFailure(
        name="key of config.json lost",
        words=r"'\w{0,60}Config' object has no attribute '(?P<tensor>\w{1,80})'|KeyError: '(?P<tensor2>scale_fmt)'",
        sources="vllm #43288; E6, Fp4",
        concerns=GENERAL,
        says="the tool wrote config.json by a class that does not know this key",
        cure="Start from the release's config.json and add the quantization config alone",
        command="fix",
        rules=("config", "extras"),
    ),
    KnownFailure(
        name="modelopt's mixed precision in an older vLLM",
        words=r"ModelOpt currently only supports:? \[(?![^\]]{0,400}MIXED_PRECISION)",
        sources="vllm #37854, #35047; dgx-spark-playbooks #77",
        concerns="builds before #35047, such as 0.15.1 in NVIDIA's container 26.02",
        says="this vLLM is older than modelopt's mixed precision, which its list of algorithms lacks; the checkpoint "
        "need not be at fault",
        cure="Use vLLM 0.32, which reads MIXED_PRECISION",
        rules=("algorithm", "dialect"),
    ),
    KnownFailure(
        name="modelopt config incomplete",
        words=r"requires the following fields in hf_quant_config|MIXED_PRECISION quant_algo requires a non-empty|"
        r"ModelOpt currently only supports: \[|Unknown ModelOpt quant algo|Missing 'quant_algo' in quantization config",
        sources="R7",
        concerns=ALL_VERSIONS,
        says="vLLM's reader of modelopt's config needs keys that this one lacks, or does not know its algorithm",
        cure="Export it again with modelopt, or write it in the other dialect",
        command="convert",
        rules=("algorithm", "dialect"),
    ),
    KnownFailure(
        name="model unknown to this vLLM",
        words=r"Model architectures \[.{1,200}\] (?:are not supported|failed)|"
        r"model type `(?P<tensor>\w{1,80})` but Transformers does not recognize",
        sources="vllm/config/model.py",
        concerns="versions before the model",
        says="this vLLM, or its transformers, has no class for the architecture or model_type of config.json",
        cure="Use a vLLM that has it, or take architectures and model_type from the release's config.json",
        rules=("family", "config"),
    ),
    KnownFailure(
        name="quantization method without support",
        words=r"GPTQ group activation ordering \(desc_act=True\)|Please install \w{1,40}[>=.\d]{0,20} via `pip install|"
        r"Unknown quantization method|Invalid quantization method",
        sources="vllm/model_executor/layers/quantization; R7, R8",
        concerns="0.32; older ones have more methods",
        says="vLLM no longer has this form of the quantization method, or a package of it is missing",
        cure="Quantize again with a method that vLLM has, or install what the message names",
        command="check",
        rules=("method", "dialect"),
    ),
    KnownFailure(
        name="FP8 weights without FP8 activations",
        words=r"is_static_input_scheme is False|'NoneType' object has no attribute 'num_bits'|"
        r"only format: pack-quantized",
        sources="M10; G4, Fp3",
        concerns=ALL_VERSIONS,
        says="a config group has FP8 weights and `input_activations: null`, which these modules do not take",
        cure="Set dynamic FP8 activations for the FP8 weights",
        command="fix",
        rules=("config-group",),
    ),
    KnownFailure(
        name="scale with other dimensions",
        words=r"output with shape \[\] doesn't match the broadcast shape|shape '\[\]' is invalid for input of size|"
        r"narrow\(\) cannot be applied to a 0-dim tensor|KV-cache scale expects a scalar weight",
        sources="vllm #43297; Fp1",
        concerns=ALL_VERSIONS,
        says="a scale was saved with other dimensions than vLLM's parameter has, such as [1] for a scalar",
        cure="Write it in the dimensions that the check names",
        command="fix",
        rules=("shapes", "kv-scales", "scale-dtype"),
    ),
    # --- KV cache, GPUs -----------------------------------------------------------------------------------------------
    KnownFailure(
        name="number format of the KV cache",
        words=r"Currently supported kv cache quantization is|Invalid strategy for compressed-tensors KV cache|"
        r"Only support symmetric scaling factor|QSA does not support KV quantization|"
        r"currently supports only FP16/BF16 KV cache|No valid attention backend found.{0,200}kv_cache_dtype=(?!auto)",
        sources="vllm/model_executor/layers/quantization/compressed_tensors; dry loads",
        concerns=ALL_VERSIONS,
        says="the quantization config asks for a KV cache that this model's attention does not have",
        cure="Serve with --kv-cache-dtype bfloat16, or remove kv_cache_scheme",
        command="fix",
        rules=("kv-cache",),
    ),
    KnownFailure(
        name="no attention kernel on this GPU",
        words=r"No valid attention backend found|no valid sparse MLA backend is available",
        sources="vllm/platforms/cuda.py; dry loads on sm89",
        concerns=ALL_VERSIONS,
        says="this GPU has no attention kernel for the model, whatever the checkpoint holds; sparse MLA needs sm90",
        cure="Serve it on another GPU",
    ),
    KnownFailure(
        name="illegal memory access",
        words=r"CUDA error: an illegal memory access|an illegal memory access was encountered",
        sources="vllm #44879, #45038",
        concerns=ALL_VERSIONS
        + " where the cache is FP8 on sm89 (L4, L40S, RTX 4090) with MTP; it has other causes too",
        says="known of an FP8 KV cache on sm89 with MTP: kv_cache_scheme makes the draft's cache FP8, and FlashInfer "
        "reads it there",
        cure="Serve with --kv-cache-dtype bfloat16; the check with --gpu sm89 says if this checkpoint is concerned",
        command="check",
        rules=("kv-cache",),
    ),
    KnownFailure(
        name="no kernel for a scheme",
        words=r"[Ff]ailed to find a kernel|No \w{1,40} (?:MoE )?backend (?:supports|is available)",
        sources="vllm/model_executor/kernels/linear/__init__.py",
        concerns=ALL_VERSIONS,
        says="no kernel on this GPU takes the scheme of a module",
        cure="Choose another scheme or another GPU",
        command="check",
        rules=("no-kernel",),
    ),
    # --- vLLM's own -------------------------------------------------------------------------------------------------
    KnownFailure(
        name="an attribute that RoutedExperts lost",
        words=r"'RoutedExperts' object has no attribute 'tp_size'",
        sources="vllm #45403, #45404, #46163",
        concerns="0.23 alone",
        says="a defect of vLLM, not of the checkpoint",
        cure="Use vLLM 0.32",
    ),
    KnownFailure(
        name="openPangu's draft",
        words=r"'OpenPanguDecoderLayer' object has no attribute 'use_sequence_parallel_moe'",
        sources="a run of vLLM 0.32.0",
        concerns="0.32.0",
        says="a defect of vLLM, not of the checkpoint",
        cure="Serve without --speculative-config, or with a later vLLM",
    ),
    # --- It serves, and something is wrong ---------------------------------------------------------------------------
    KnownFailure(
        name="scales of fused parts disagree",
        words=r"In NVFP4 linear, the (?:weight|input) global scale is different|"
        r"w1_weight_(?:global_scale|scale_2) must match",
        sources="vllm #54150; M15, Fp7",
        concerns=ALL_VERSIONS + ", as a warning",
        says="vLLM takes one global scale for a fused module, and the checkpoint has two: one half is mis-scaled",
        cure="Read the scales and let gate and up share one",
        command="values",
        rules=("fused-scales",),
    ),
    KnownFailure(
        name="scales of the KV cache not found",
        words=r"but not found the expected name in the model .{0,300}is not loaded",
        sources="vllm/model_executor/model_loader/weight_utils.py",
        concerns=ALL_VERSIONS,
        says="vLLM's class has no parameter for a scale of the KV cache; it takes 1.0",
        cure="Nothing, unless the cache is FP8: then compare answers with --kv-cache-dtype bfloat16",
        rules=("kv-scales",),
    ),
    KnownFailure(
        name="draft accepted at 0 %",
        words=r"Avg Draft acceptance rate: [0-4]\.\d{1,4}%|Mean acceptance length: 1\.0[0-4]\b",
        sources="vllm #41789, #43455, #43456, #37667; sglang #35797; F9, F21, F24, F27, M4",
        concerns=ALL_VERSIONS,
        says="the draft guesses: its weights were never filled, were read in another form, or the MTP block is not "
        "this model's",
        cure="Let vLLM's own loaders say what stays unfilled, with --gpu, and read the values",
        command="values",
        rules=("form", "mtp-missing", "mtp-incomplete", "alias", "glue", "dry-load", "layer-missing", "unindexed"),
    ),
)
