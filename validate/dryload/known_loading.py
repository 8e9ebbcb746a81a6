"""Failures while vLLM builds and loads the draft: the MTP block is not there, or in another form than vLLM builds.

In: nothing. Out: `LOADING`, in the order in which they are tried: an entry that says more stands before one that says
less.

Easy to get wrong: no expression may repeat a group that repeats, or a stranger's line makes it slow.
"""

from .failure import ALL_VERSIONS, GENERAL, KnownFailure

_NAMED = r"'?(?P<tensor>[\w.]{1,300})'?"
_BUILT_QUANTIZED = ("form", "entry-unmatched", "glue", "config-group")
_MTP_NAME = r"(?:mtp_block|mtp\.|\.mtp_layers\.|shared_head|eh_proj|enorm|hnorm)"
_OURS = "a defect of vLLM, not of the checkpoint"
_NEWER = "Use vLLM 0.32"
_W13 = r"experts\.(?:routed_experts\.)?w(?:13|2)_"

LOADING: tuple[KnownFailure, ...] = (
    # --- Defects of older vLLM, before the general words that they share with faults of a checkpoint ------------------
    KnownFailure(
        name="DeepSeek's draft without its fused projection",
        words=r"KeyError: '(?P<tensor>[\w.]{0,200}mtp_block\.self_attn\.kv_a_proj_with_mqa\.weight)'",
        sources="vllm #21874, #22934",
        concerns="0.10.0; #22934 mended it",
        says=_OURS + ": its draft looks for a fused projection where it built two",
        cure=_NEWER,
    ),
    KnownFailure(
        name="DeepSeek's target reads the MTP layer",
        words=r"KeyError: '(?P<tensor>layers\.61\.mlp\.experts\.w(?:13|2)_weight)' "
        r"\[vllm/model_executor/models/deepseek_v2",
        sources="vllm #16450, #16453",
        concerns="builds before 0.8.4; #16453 mended it",
        says=_OURS + ": the target loads layer 61, which is the MTP layer, and has no place for it",
        cure=_NEWER,
    ),
    KnownFailure(
        name="shared experts that AITER fuses",
        words=r"KeyError: '(?P<tensor>[\w.]{0,200}mtp_block\.mlp\.shared_experts\.[\w.]{1,60}weight_scale_inv)'",
        sources="ROCm/vllm #777; vllm #27563",
        concerns="builds for ROCm before #27563; elsewhere other words of the config than of the tensors",
        says="on ROCm a defect of vLLM: AITER fuses shared experts into the routed ones, and the draft's loader did "
        "not know it",
        cure="On ROCm use vLLM 0.32, or set VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=0; elsewhere check the names",
        command="check",
        rules=("form",),
    ),
    KnownFailure(
        name="routed experts of DeepSeek's draft",
        words=r"KeyError: '(?P<tensor>[\w.]{0,200}mtp_block\.mlp\.experts\.\d{1,4}\.[a-z]{2,4}_proj\.weight)'",
        sources="vllm #29448, #29545",
        concerns="builds from #27563 to #29545",
        says=_OURS + ": the draft's loader lost its way to routed experts",
        cure=_NEWER,
        rules=("experts",),
    ),
    KnownFailure(
        name="GLM-OCR's draft",
        words=r"Following weights were not initialized from checkpoint: .{0,400}"
        r"(?P<tensor>model\.layers\.16\.(?:mtp_block|eh_proj|enorm|hnorm|shared_head)\.[\w.]{1,100})",
        sources="vllm #49856, #49869",
        concerns="0.26 and 0.27; #49869 mended it",
        says=_OURS + ": it does not recognize the MTP layer of GLM-OCR, whose names have a prefix",
        cure=_NEWER,
        rules=("mtp-missing", "mtp-incomplete"),
    ),
    KnownFailure(
        name="no line for a module in vLLM Ascend",
        words=r"KeyError: '(?P<tensor>[\w.]{1,300})' \[vllm_ascend/quantization/",
        sources="vllm-ascend #5794, #3520; F47",
        concerns="vLLM Ascend, which is a plugin with a dialect of its own; keepmtp was not read against it",
        says="vLLM Ascend looks each module up in quant_model_description.json, and the checkpoint's has no line for "
        "this one: often the tool that wrote it left the MTP layer out",
        cure="Quantize it again with a tool that describes the MTP layer too, or serve without --speculative-config",
    ),
    # --- The MTP block is not there -----------------------------------------------------------------------------------
    KnownFailure(
        name="MTP weights dropped",
        words=r"MTP speculative decoding layer \d{1,6} weights missing from checkpoint",
        sources="vllm #35548; F1, F3, F4, F5",
        concerns="0.17 and newer say it; older ones draft from uninitialised memory, at 0 % acceptance",
        says="the tool that quantized the checkpoint dropped the MTP layer, and config.json still promises it",
        cure="Bring the MTP block back from the release, or serve without --speculative-config",
        command="graft",
        rules=("mtp-missing", "layer-missing", "mtp-incomplete", "unindexed"),
    ),
    KnownFailure(
        name="weights of the draft not initialised",
        words=r"Following weights were not initialized from checkpoint: \{?" + _NAMED,
        sources="vllm #25993, #28805; vllm-ascend #6754; F36",
        concerns=GENERAL,
        says="vLLM's draft has parameters that no tensor of the checkpoint fills, often its embedding and its head; "
        "only plain checkpoints are asked so",
        cure="Bring the named tensors back from the release",
        command="graft",
        rules=("mtp-missing", "mtp-incomplete", "layer-incomplete", "alias", "unindexed"),
    ),
    KnownFailure(
        name="shard missing",
        words=r"Weight files referenced in index but missing|No such file or directory: '[^']{1,400}\.safetensors'",
        sources="M8",
        concerns=ALL_VERSIONS,
        says="the index names a file that is not in the folder",
        cure="Download the checkpoint again, or take the index that belongs to these files",
        command="check",
        rules=("files", "unindexed"),
    ),
    KnownFailure(
        name="DSpark in place of an MTP block",
        words=r"KeyError: '(?P<tensor>[\w.]{1,200}\.(?:main_norm|main_proj|markov_head|confidence_head)\.[\w.]{1,40})'",
        sources="vllm #52111, #52165",
        concerns=ALL_VERSIONS,
        says="the mtp.* tensors of DeepSeek-V4-Flash-0731 and its like are stages of DSpark, no MTP block",
        cure="""Serve with --speculative-config '{"method": "dspark", "num_speculative_tokens": 5}'""",
        rules=("family",),
    ),
    # --- The MTP block is plain, and vLLM builds it quantized ---------------------------------------------------------
    KnownFailure(
        name="plain head built as NVFP4",
        words=r"NVFP4 weight_scale for layer '?(?P<tensor>[\w.]{1,200})'? was never loaded",
        sources="vllm #57532, #55442, #52501; F38",
        concerns="0.31 and newer",
        says="modelopt's dialect quantizes every head that no entry excludes, the draft's own too, and the checkpoint "
        "has it in BF16",
        cure="Exclude it: '*lm_head*' and '*shared_head*', and the name that `keepmtp check` shows",
        command="fix",
        rules=("draft-head", "form"),
    ),
    KnownFailure(
        name="head quantized by modelopt",
        words=r"no module or parameter named '(?P<tensor>[\w.]{0,100}lm_head\.(?:input_scale|weight_scale\w{0,4}))'",
        sources="vllm #45102, #44081",
        concerns="0.22 and older",
        says="the head is in NVFP4, and this vLLM has no parameters for its scales",
        cure="Use vLLM 0.32, which builds such a head",
        rules=("form",),
    ),
    KnownFailure(
        name="plain experts of the draft built quantized",
        words=r"'RoutedExperts' object has no attribute '(?P<tensor>w(?:13|2)_\w{1,20})'",
        sources="vllm #48814, #48816, #47828; F16",
        concerns="0.29 and older for GPTQ; later ones leave MTP plain if `dynamic` has an entry '-:.*mtp.*'",
        says="the experts of the MTP block are BF16 on disk, and vLLM builds them by the backbone's quantization",
        cure="Except the MTP block: GPTQ by '-:.*mtp.*' in `dynamic`, others by their ignore list",
        command="fix",
        rules=(*_BUILT_QUANTIZED, "experts"),
    ),
    KnownFailure(
        name="experts built in another form",
        words=r"Layer [\w.]{1,200} has no parameter '\w{1,40}' for checkpoint weight '(?P<tensor>[\w.]{1,300})'",
        sources="vllm/model_executor/layers/fused_moe/routed_experts.py; F14, F16, F26, F28",
        concerns="0.32 and newer; older ones raise KeyError or AttributeError for the same",
        says="the checkpoint has these experts plain and vLLM built them quantized, or the other way",
        cure="Make targets and ignore say what the files hold, in vLLM's names",
        command="fix",
        rules=(*_BUILT_QUANTIZED, "experts", "fused-uniform"),
    ),
    KnownFailure(
        name="stacked experts without a parameter",
        words=r"KeyError: '(?P<tensor>[\w.]{0,200}" + _W13 + r"weight)'",
        sources="vllm #41994, #36954, #39475, #44953; F14, F15, H1",
        concerns=GENERAL,
        says="vLLM built these experts quantized, and the checkpoint has them plain: no entry excepts experts under "
        "vLLM's own name. Of a checkpoint without quantization it is a defect of 0.22 (#44953)",
        cure="Except the experts of the MTP block, e.g. 're:^mtp[.]' in ignore",
        command="fix",
        rules=(*_BUILT_QUANTIZED, "experts"),
    ),
    KnownFailure(
        name="quantized experts without a parameter",
        words=r"KeyError: '(?P<tensor>[\w.]{0,200}"
        + _W13
        + r"(?:weight_packed|weight_scale\w{0,6}|weight_global_scale|"
        r"input_(?:global_)?scale|qweight|scales)[\w.]{0,40})'",
        sources="vllm #43304, #43454; auto-round #1464; llm-compressor #2568; F18, M6",
        concerns=GENERAL,
        says="the checkpoint has quantized experts, and vLLM built them plain or in another scheme: targets do not "
        "reach them, or the names are not the release's",
        cure="Make targets and ignore say what the files hold, in vLLM's names",
        command="fix",
        rules=(*_BUILT_QUANTIZED, "experts", "unknown-tensor", "mtp-prefix"),
    ),
    KnownFailure(
        name="scales of the KV cache in the MTP layer",
        words=r"KeyError: '(?P<tensor>[\w.]{0,200}\.[kvq]_scale)'|"
        r"'NoneType' object has no attribute 'startswith'|"
        r"no module or parameter named '(?P<tensor2>[\w.]{0,200}\.[kvq]_scale)'",
        sources="vllm #27227; F32",
        concerns="0.32, by family",
        says="the checkpoint has k_scale and v_scale in a layer whose loader does not know them",
        cure="Remove these scales: the cache then has scale 1.0 there",
        command="fix",
        rules=("kv-scales",),
    ),
    KnownFailure(
        name="scale without a parameter in the draft",
        words=r"KeyError: '(?P<tensor>[\w.]{0,200}" + _MTP_NAME + r"[\w.]{0,200}(?:weight_packed|scale\w{0,8}))'",
        sources="F18, F42, H7; G5",
        concerns=GENERAL,
        says="the MTP block holds quantized weights or scales that vLLM's draft has no parameter for; eh_proj is a "
        "plain matrix in most families",
        cure="Bring that module back in BF16 from the release",
        command="graft",
        rules=("glue", "kv-scales", "form", "unknown-tensor"),
    ),
    KnownFailure(
        name="no target for a name",
        words=r"Unable to find matching target for (?P<tensor>[\w.]{0,200}) ?in the compressed-tensors config",
        sources="vllm #44817, #44837, #36247; F19, G3, G6",
        concerns="0.28 and older; later ones build such a module plain, without a word. An empty name is vLLM's own "
        "defect for e_proj and h_proj of DeepSeek-V4",
        says="no target and no ignore entry matches the name that vLLM gives the module",
        cure="Use vLLM 0.32, and write targets and ignore in vLLM's names",
        command="fix",
        rules=("entry-unmatched", "form"),
    ),
    KnownFailure(
        name="parts of a fused module differ",
        words=r"Found different quantization schemes for the shards of (?P<tensor>[\w.]{1,200})|"
        r"Detected some but not all shards of (?P<tensor2>[\w.]{1,200})|"
        r"All MoE projections need to have same quantization scheme|Mixed quant_algo within fused layer",
        sources="vllm #40252; sglang #35797, #35887; F27, F34",
        concerns=ALL_VERSIONS,
        says="vLLM fuses these matrices into one module, and the ignore list names only some of them",
        cure="Put all parts of the fused module, or its fused name, on the same list",
        command="fix",
        rules=("config-group", "fused-uniform"),
    ),
    KnownFailure(
        name="weight of another width",
        words=r"AssertionError: (?:assert )?(?:self\.data|param_data|param\.data|param)\.(?:shape|size\(\)) == "
        r"loaded_weight\.(?:shape|size\(\))|assert (?:param_data|self\.data|param)\.shape == loaded_weight\.shape|"
        r"The size of tensor a \(\d{1,9}\) must match the size of tensor b \(\d{1,9}\)|"
        r"output with shape \[\d[\d, ]{0,60}\] doesn't match the broadcast shape of \[|"
        r"AssertionError:? ?\[vllm/model_executor/(?:parameter|layers/linear|layers/vocab_parallel_embedding)\.py|"
        r"size mismatch \(?\d{1,9} vs|Attempted to load weight \(|Tried to load weights of size",
        sources="vllm #38832, #35031, #46316, #49187, #52649, #44087, #53387; sglang #36158; F11, F12, F13, F17, F20",
        concerns=GENERAL,
        says="vLLM built a module for packed weights, and the checkpoint has it plain (twice as wide), or vice versa",
        cure="Except the MTP block from quantization in vLLM's names (mtp.fc is one that lists forget), or bring it in "
        "the form that the config promises",
        command="fix",
        rules=(*_BUILT_QUANTIZED, "shapes", "draft-head"),
    ),
    KnownFailure(
        name="packed weight at this TP size",
        words=r"start \(\d{1,9}\) \+ length \(\d{1,9}\) exceeds dimension size|"
        r"is not divisible by weight quantization|not divisible by (?:min_thread|tensor parallel)",
        sources="vllm #45420, #46426, #52480; F22, F40",
        concerns=ALL_VERSIONS,
        says="a rank's part of the module is no whole number of groups or blocks, or the draft has another form",
        cure="Serve with a smaller --tensor-parallel-size, or keep this module in BF16",
        command="check",
        rules=("shapes", "form"),
    ),
    KnownFailure(
        name="attribute of another form",
        words=r"'\w{0,40}Linear' object has no attribute '(?P<tensor>weight_scale(?:_inv)?|weight|qweight|data)'",
        sources="vllm #43304; TensorRT-LLM #6137; F18, F23, Fp5",
        concerns=GENERAL,
        says="code of the model reads a scale or weight that the module does not have, because it was built in another "
        "form than the code expects",
        cure="Store that module in the form of its neighbours, or in BF16 with an ignore entry",
        command="check",
        rules=(*_BUILT_QUANTIZED, "kv-scales"),
    ),
    # --- Names --------------------------------------------------------------------------------------------------------
    KnownFailure(
        name="prefix of the vision-language model on MTP names",
        words=r"There is no module or parameter named '(?P<tensor>language_model[\w.]{0,200})' in \w{0,60}MTP",
        sources="jetson-ai-lab #362; F37",
        concerns=ALL_VERSIONS,
        says="the MTP tensors have the names of the whole vision-language model, and the draft knows `mtp.*`",
        cure="Give them the release's names",
        command="fix",
        rules=("mtp-prefix",),
    ),
    KnownFailure(
        name="name without a parameter",
        words=r"There is no module or parameter named '(?P<tensor>[\w.]{1,300})'|Unexpected Inkling MTP weight: "
        r"(?P<tensor2>[\w.]{1,300})|KeyError: '(?P<tensor3>[\w.]{0,200}layers\.\d{1,5}\.[\w.]{1,200})'",
        sources="vllm #25797; F7, E7, E9, G2, G5, Fp5",
        concerns=GENERAL,
        says="the checkpoint has a tensor for which vLLM's class has no parameter: another name than the release's, or "
        "a module that vLLM built in another form",
        cure="Give it the release's name; if it is a scale or packed weight, make the ignore list fit the files",
        command="fix",
        rules=("unknown-tensor", "form", "mtp-prefix", "kv-scales", "glue"),
    ),
)
