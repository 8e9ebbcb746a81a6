"""Every known failure is found by the text that its public thread quotes, or that vLLM's source
would write.

In: a line for each entry. `thread` texts were read in stored copies of the threads; `vLLM` ones are
made from the message's format in vLLM 0.32.0's source. Out: the entry, and nothing else.
"""

import re
import time
from pathlib import Path

import pytest
from keepmtp.validate.dryload.explain import explain
from keepmtp.validate.dryload.failures import known, known_defect, known_failure
from keepmtp.validate.dryload.log import parse_log
from keepmtp.validate.facts.dry_load import LoadFailure

ROOT = Path(__file__).parent.parent.parent.parent
ROWS = [row for rows in known().values() for row in rows]
SAID: list[tuple[str, str, str]] = [
    ("MTP weights dropped", "vllm #35548",
     "(Worker_TP1_EP1 pid=1474351) ERROR 02-27 16:21:24 [multiproc_executor.py:796] ValueError: " "MTP speculative "
     "decoding layer 78 weights missing from checkpoint. The checkpoint may have been quantized " "without including "
     "the MTP layers. Use a checkpoint that includes MTP layer weights, or disable speculative " "decoding."),
    ("weights of the draft not initialised", "vllm-ascend #6754",
     "ValueError: Following weights were not initialized from checkpoint: " "{'model.layers.78.shared_head.head.weight', "
     "'model.embed_tokens.weight'}"),
    ("shard missing", "vLLM", "RuntimeError: Weight files referenced in index but missing: model-3.safetensors"),
    ("DSpark in place of an MTP block", "vllm #52111", "KeyError: 'model.layers.43.mtp_block.main_norm.weight'"),
    ("plain head built as NVFP4", "vllm #57532",
     "RuntimeError: NVFP4 weight_scale for layer 'parallel_lm_head' was never loaded (still NaN)."),
    ("head quantized by modelopt", "vllm #45102",
     ("ValueError: There is no module or parameter named 'lm_head.input_scale' in " "Qwen3_5MoeForCausalLM.")),
    ("DeepSeek's draft without its fused projection", "vllm #21874",
     "(VllmWorker rank=6 pid=6132) ERROR 07-29 16:04:46 [multiproc_executor.py:557] KeyError: "
     "'model.layers.61.mtp_block.self_attn.kv_a_proj_with_mqa.weight'"),
    ("shared experts that AITER fuses", "ROCm/vllm #777",
     "KeyError: 'model.layers.61.mtp_block.mlp.shared_experts.down_proj.weight_scale_inv'"),
    ("routed experts of DeepSeek's draft", "vllm #29448",
     "KeyError: 'model.layers.61.mtp_block.mlp.experts.195.down_proj.weight'"),
    ("GLM-OCR's draft", "vllm #49856",
     "ValueError: Following weights were not initialized from checkpoint: " "{'model.layers.16.enorm.weight', "
     "'model.layers.16.hnorm.weight', 'model.layers.16.eh_proj.weight'}"),
    ("SGLang finds no target for a module", "SGLang",
     "ValueError: Unable to find matching target for model.decoder.self_attn.qkv_proj in the " "compressed-tensors "
     "config."),
    ("SGLang passes over a tensor of the draft", "sglang #35797",
     "Parameter model.layers.0.q_proj.weight not found in params_dict, skip loading"),
    ("SGLang takes one MTP layer", "SGLang", "AssertionError: Only 1 nextn layer is supported"),
    ("plain experts of the draft built quantized", "vllm #48814",
     ("AttributeError: 'RoutedExperts' object has no attribute 'w2_weight'. Did you mean: " "'w2_qweight'?")),
    ("experts built in another form", "a dry load of Qwen3.5",
     "AttributeError: Layer mtp.layers.0.mlp.experts has no parameter 'w2_weight' for checkpoint " "weight "
     "'mtp.layers.0.mlp.experts.0.down_proj.weight'"),
    ("stacked experts without a parameter", "vllm #44953", "KeyError: 'layers.13.mlp.experts.w13_weight'"),
    ("stacked experts without a parameter", "vllm #23025", "KeyError: 'layers.1.mlp.experts.w13_weight'"),
    ("quantized experts without a parameter", "vllm #43454", "KeyError: 'layers.0.ffn.experts.w13_input_scale'"),
    ("quantized experts without a parameter", "llm-compressor #2568",
     "KeyError: 'language_model.language_model.layers.0.mlp.experts.w2_weight_packed'"),
    ("scale without a parameter in the draft", "docs/failures.md F42",
     "KeyError: 'model.layers.92.eh_proj.weight_scale'"),
    ("scales of the KV cache in the MTP layer", "a dry load of GLM-4.7",
     "KeyError: 'model.layers.3.mtp_block.self_attn.k_scale'"),
    ("scales of the KV cache in the MTP layer", "a dry load of DeepSeek-V3.2",
     "AttributeError: 'NoneType' object has no attribute 'startswith'"),
    ("no target for a name", "vllm #44817",
     "ValueError: Unable to find matching target for  in the compressed-tensors config."),
    ("no target for a name", "vllm #36247",
     "ValueError: Unable to find matching target for model.layers.0.self_attn.fused_qkv_a_proj " "in the "
     "compressed-tensors config."),
    ("parts of a fused module differ", "vLLM",
     "ValueError: Found different quantization schemes for the shards of " "mtp.layers.0.self_attn.qkv_proj. vLLM "
     "requires all to use the same scheme."),
    ("weight of another width", "vllm #52649", "AssertionError: self.data.shape == loaded_weight.shape"),
    ("weight of another width", "vllm #44087", "    assert param_data.shape == loaded_weight.shape"),
    ("weight of another width", "ms-swift #8086",
     ("AssertionError: Attempted to load weight (torch.Size([4096, 2560])) into parameter " "(torch.Size([6144, 2560]))")),
    ("packed weight at this TP size", "docs/failures.md F22",
     "RuntimeError: start (4096) + length (4096) exceeds dimension size (4096)."),
    ("attribute of another form", "TensorRT-LLM #6137",
     "AttributeError: 'Linear' object has no attribute 'weight_scale'"),
    ("prefix of the vision-language model on MTP names", "jetson-ai-lab #362",
     "ValueError: There is no module or parameter named 'language_model' in Qwen3_5MoeMTP"),
    ("name without a parameter", "a dry load of Inkling",
     ("ValueError: Unexpected Inkling MTP weight: " "model.mtp.layers.0.transformer_block.attn.k_scale")),
    ("count of MTP layers missing or zero", "docs/failures.md M7",
     "ZeroDivisionError: integer modulo by zero"),
    ("name without a parameter", "vllm #25797", "KeyError: 'layers.45.mlp.shared_expert.down_proj.weight'"),
    ("name without a parameter", "vllm #40358", "KeyError: 'layers.0.mlp.experts.w13_bias'"),
    ("name without a parameter", "llm-compressor #2255", "KeyError: 'layers.0.mlp.down_proj.weight_zero_point'"),
    ("weight of another width", "dgx-vllm #6", "AssertionError [vllm/model_executor/parameter.py:153]"),
    ("weight of another width", "a dry load of GLM-4.7",
     "RuntimeError: output with shape [512, 128] doesn't match the broadcast shape of [512, 256]"),
    ("weight of another width", "a dry load of Qwen3.5", "AssertionError [vllm/model_executor/parameter.py:150]"),
    ("model unknown to this vLLM", "a dry load",
     "Value error, Model architectures ['Glm9ForCausalLM'] are not supported for now."),
    ("quantization method without support", "a dry load",
     "Value error, GPTQ group activation ordering (desc_act=True) is no longer supported."),
    ("drafted tokens and MTP layers", "vLLM", "ValueError: num_speculative_tokens:3 must be divisible by n_predict=2"),
    ("layer_types of the wrong length", "docs/failures.md E5",
     "ValueError: num_hidden_layers (43) must be equal to the number of layer types (44)"),
    ("key of config.json lost", "docs/failures.md E6",
     ("AttributeError: 'DeepseekV4Config' object has no attribute 'compress_ratios'. Did you " "mean: 'compress_rates'?")),
    ("modelopt's mixed precision in an older vLLM", "vllm #37854",
     "ValueError: ModelOpt currently only supports: ['FP8', 'FP8_PER_CHANNEL_PER_TOKEN', " "'FP8_PB_WO', 'NVFP4'] "
     "quantizations in vLLM. Please check the `hf_quant_config.json` file for your model's quant " "configuration."),
    ("config of a quantization incomplete", "vLLM",
     "ValueError: ModelOpt currently only supports: ['FP8', 'NVFP4', 'MXFP8', 'MIXED_PRECISION'] " "quantizations in "
     "vLLM. Please check the `hf_quant_config.json` file for your model's quant configuration."),
    ("config of a quantization incomplete", "vLLM",
     ("ValueError: NVFP4 quantization requires the following fields in hf_quant_config.json: " "['group_size']")),
    ("config of a quantization incomplete", "a dry load", "Value error, Unknown ModelOpt quant algo: MIXED_PRECISION"),
    ("FP8 weights without FP8 activations", "docs/failures.md M10",
     "AttributeError: 'NoneType' object has no attribute 'num_bits'"),
    ("scale with other dimensions", "docs/failures.md Fp1",
     "RuntimeError: output with shape [] doesn't match the broadcast shape [1]"),
    ("number format of the KV cache", "a dry load of Qwen3.8-Flash-Next",
     "NotImplementedError: Qwen4Exp QSA does not support KV quantization"),
    ("no attention kernel on this GPU", "a dry load of GLM-5 on sm89",
     "ValueError: No valid attention backend found for cuda with " "AttentionSelectorConfig(head_size=576, "
     "dtype=torch.bfloat16, kv_cache_dtype=auto, block_size=None, use_mla=True)"),
    ("illegal memory access", "TensorRT-LLM #8125",
     "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ("no kernel for a scheme", "vLLM",
     "ValueError: Failed to find a kernel that can implement the NVFP4 linear layer."),
    ("an attribute that RoutedExperts lost", "vllm #45403",
     "AttributeError: 'RoutedExperts' object has no attribute 'tp_size'"),
    ("openPangu's draft", "a run of vLLM 0.32.0",
     "AttributeError: 'OpenPanguDecoderLayer' object has no attribute 'use_sequence_parallel_moe'"),
    ("scales of fused parts disagree", "vLLM",
     "WARNING 09-18 10:00:00 [compressed_tensors_w4a4_nvfp4.py:102] In NVFP4 linear, the weight " "global scale is "
     "different for parallel layers (e.g. q_proj, k_proj, v_proj)."),
    ("scales of the KV cache not found", "vLLM",
     "Found k_scale in the checkpoint (e.g. model.layers.0.self_attn.k_scale), but not found the " "expected name in the "
     "model (e.g. model.layers.0.self_attn.attn.k_scale). k_scale is not loaded."),
    ("draft accepted at 0 %", "the format of ik_llama.cpp #1669's log, with vllm #41789's rate",
     "(APIServer pid=1077249) INFO 04-23 00:30:06 [metrics.py:101] SpecDecoding metrics: Mean " "acceptance length: 1.01, "
     "Accepted throughput: 0.10 tokens/s, Drafted throughput: 19.20 tokens/s, Accepted: 1 " "tokens, Drafted: 500 tokens, "
     "Per-position acceptance rate: 0.004, 0.000, Avg Draft acceptance rate: 0.2%"),
]  # fmt: skip
# What only the place of the exception tells from a fault of the checkpoint: the frame, and the
# exception.
RAISED = [
    ("DeepSeek's target reads the MTP layer", "vllm #16450",
     ('  File "/usr/lib/python3.10/dist-packages/vllm/model_executor/models/deepseek_v2.py", ' 'line ' '1, in load_weights'),
     "KeyError: 'layers.61.mlp.experts.w2_weight'"),
    ("no line for a module in vLLM Ascend", "vllm-ascend #5794",
     "vllm-ascend-glm47  | (Worker_TP0 pid=367) ERROR 01-12 05:03:38 [multiproc_executor.py:751] " "  File "
     '"/vllm-workspace/vllm-ascend/vllm_ascend/quantization/quant_config.py", line 1, in ' 'is_layer_skipped',
     "vllm-ascend-glm47  | (Worker_TP0 pid=367) ERROR 01-12 05:03:38 [multiproc_executor.py:751] " "KeyError: "
     "'model.layers.92.self_attn.q_proj.weight'"),
]  # fmt: skip
# What dry loads of vLLM 0.32.0 have met, as the table reads it.
MET = [
    ("Step's draft and layer_types", "IndexError: list index out of range [vllm/model_executor/models/step3p5.py:421]"),
    ("Step's draft and constant scales", "ValueError: weights would falsely use random initialization []"),
    ("Step's heads by layer", "AmbiguousGlobalPerLayerAttributeError: num_attention_heads [x.py:1]"),
    ("Nemotron Omni's vision key",
     ("AttributeError: no attribute 'vit_hidden_size' " "[vllm/model_executor/models/nano_nemotron_vl.py:9]")),
    ("Nemotron Omni's draft without its config",
     "TypeError: CompressedTensorsConfig.__init__() missing 5 required positional arguments []"),
    ("attention with an indexer under modelopt's NVFP4",
     "AttributeError: 'Qwen4ExpQSAQKVIndexerLinear' object has no attribute 'weight_scale' []"),
    ("Kimi's padded delta net",
     ("AttributeError: 'MergedColumn' object has no attribute 'weight' " "[vllm/models/kimi_k3/nvidia/kda.py:12]")),
    ("MiniMax's fused indexer with one scale a tensor",
     "AssertionError: index_q has no shard [vllm/model_executor/parameter.py:117]"),
    ("sections of the rotary embedding",
     "AssertionError: [vllm/model_executor/layers/rotary_embedding/mrope.py:230]"),
    ("a build for AMD's GPUs", "ImportError: quantization quark requires amd-quark package []"),
    ("memory of the dry load", "RuntimeError: DefaultCPUAllocator: can't allocate []"),
]  # fmt: skip
GOOD = [
    "(APIServer pid=1077249) INFO 04-23 00:30:06 [metrics.py:101] SpecDecoding metrics: Mean "
    "acceptance length: 2.62, "
    "Per-position acceptance rate: 0.885, 0.740, Avg Draft acceptance rate: 81.2%",
    "Avg Draft acceptance rate: 40.2%",
    "KeyError: 'usage'",
    "ValueError: The checkpoint you are trying to load has no chat template",
    "AttributeError: 'NoneType' object has no attribute 'shape'",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB",
]


@pytest.mark.parametrize(
    ("name", "origin", "line"), SAID, ids=[f"{name}: {origin}" for name, origin, _ in SAID]
)
def test_the_words_of_a_thread_name_the_failure(name, origin, line):
    (told,) = parse_log(line.encode()).lines
    found = known_failure(told)
    assert found is not None and found[0].name == name
    assert all((found[0].says, found[0].cure, found[0].concerns, found[0].sources))


@pytest.mark.parametrize(
    ("name", "origin", "frame", "line"), RAISED, ids=[origin for _, origin, *_ in RAISED]
)
def test_the_place_of_an_exception_tells_a_defect_from_a_fault(name, origin, frame, line):
    (answer,) = explain(None, parse_log(f"{frame}\n{line}\n".encode())).answers
    assert answer.failure.name == name and not answer.failure.is_general
    (answer,) = explain(None, parse_log(line.encode())).answers
    assert answer.failure.is_general


def test_what_sglang_raises_is_not_told_of_vllm():
    """sglang #3075; without the frame the words are general."""
    line = "KeyError: 'model.layers.3.mlp.experts.w2_weight_scale_inv'"
    frame = (
        '  File "venv/lib/python3.10/site-packages/sglang/srt/models/deepseek_v2.py", line 920, '
        "in load_weights"
    )
    told = explain(None, parse_log(f"{frame}\n{line}\n".encode()))
    assert told.answers == () and told.unknown == (
        f"{line} (sglang/srt/models/deepseek_v2.py:920)",
    )
    assert explain(None, parse_log(line.encode())).is_explained


def test_what_is_said_of_versions_was_read_in_them():
    """Older versions were not read, and words that many faults share say so."""
    assert not [failure.name for failure in ROWS if "all up to" in failure.concerns]
    assert sum(failure.is_general for failure in ROWS) > 5


@pytest.mark.parametrize(("name", "text"), MET, ids=[name for name, _ in MET])
def test_what_a_dry_load_met_is_known(name, text):
    found = known_failure(text, kinds=("dry_load", "defects", "failures"))
    assert found is not None and found[0].name == name


def test_a_defect_is_of_its_families_and_of_its_release():
    failure = LoadFailure(
        stage="load", role="draft", type="IndexError", words="", at="vllm/models/step3p5.py:421"
    )
    assert known_defect(failure, family="step3p5", version="0.32.0") is not None
    assert known_defect(failure, family="glm4_moe", version="0.32.0") is None
    assert known_defect(failure, family="step3p5", version="0.33.0") is None


def test_every_entry_has_words_from_somewhere():
    assert {failure.name for failure in ROWS} == {name for name, *_ in (*SAID, *RAISED, *MET)}
    assert len({failure.name for failure in ROWS}) == len(ROWS)


@pytest.mark.parametrize("line", GOOD)
def test_what_is_no_such_failure_is_not_called_one(line):
    assert all(known_failure(told) is None for told in parse_log(line.encode()).lines)


def test_the_rules_that_confirm_exist():
    """Each is a word of the code that finds: static rules, or those of the dry load."""
    sources = "".join(path.read_text() for path in (ROOT / "validate").rglob("*.py"))
    assert {rule for failure in ROWS for rule in failure.rules} <= {
        *re.findall(r'"([a-z-]+)"', sources)
    }


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        "mtp.",
        "layers.0.",
        "KeyError: '",
        "experts.w2_weight",
        "[",
        'File "',
        "ERROR 02-27 16:21:24 [x] ",
        "\x1b[1",
        "Following weights were not initialized from checkpoint: model.layers.16.",
    ],
)
def test_no_line_makes_the_table_slow(unit):
    """8 MiB of it in one line, and as lines."""
    began = time.process_time()
    for raw in ((unit * (8 << 20))[: 8 << 20], (unit * 40 + "Error\n") * 4000):
        for line in parse_log(raw.encode()).lines:
            known_failure(line)
    assert time.process_time() - began < 5
