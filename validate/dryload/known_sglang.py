"""Failures while SGLang builds and loads the draft.

In: nothing. Out: `IN_SGLANG`, in the order in which they are tried.

Easy to get wrong: the words are SGLang's own. vLLM has other ones for the same fault, or none.
"""

from .failure import KnownFailure

_VERSION = "SGLang 0.5.23; vLLM builds such a module plain"

IN_SGLANG: tuple[KnownFailure, ...] = (
    KnownFailure(
        name="SGLang finds no target for a module",
        words=r"Unable to find matching target for (?P<tensor>model\.(?:decoder|heads|mtp_block)\.[\w.]{1,300}) in the",
        sources="sglang #38574, #40002; sglang/srt/layers/quantization/compressed_tensors/utils.py",
        concerns=_VERSION,
        says="SGLang asks the quantization config about its own name of the module, which neither ignore nor a target "
        "names: the draft of DeepSeek and GLM is model.decoder there",
        cure="Add SGLang's name to ignore, or to the targets of the group: `keepmtp check PATH --runtime sglang` says "
        "which",
        command="check",
    ),
    KnownFailure(
        name="SGLang passes over a tensor of the draft",
        words=r"Parameter (?P<tensor>[\w.]{1,300}) not found in params_dict, skip loading",
        sources="sglang #35797, #35887; F27",
        concerns="SGLang; 0.5.23 says so once for all tensors",
        says="the draft has no parameter for the tensor, because it was built in another form than the checkpoint has: "
        "the draft guesses, and its accepted length is 1.000",
        cure="List the fused names too, or the whole block by an expression: `keepmtp check PATH --runtime sglang`",
        command="check",
    ),
    KnownFailure(
        name="SGLang takes one MTP layer",
        words=r"AssertionError: Only 1 nextn layer is supported",
        sources="sglang/srt/models/deepseek_common/deepseek_weight_loader.py, sglang/srt/models/glm4_moe.py",
        concerns="SGLang 0.5.23",
        says="config.json promises more MTP layers than one",
        cure="Set num_nextn_predict_layers to 1 in a copy, or serve it with vLLM",
        command="check",
    ),
)
