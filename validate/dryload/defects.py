"""What vLLM itself cannot do with an MTP draft, whatever the checkpoint holds.

In: a `LoadFailure` and the family. Out: the known defect of vLLM that caused it, or None. The finding names vLLM and
its version, so that nobody looks for the fault in the checkpoint.

Easy to get wrong: a defect ends with a release. `versions` lists those that have it.
"""

import re
from dataclasses import dataclass

from ..facts.dry_load import LoadFailure


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A defect of a vLLM release.

    Attributes:
        versions: releases that have it.
        families: model_types concerned; empty for any.
        words: regular expression on "<exception>: <message> [<file:line>]".
        says: what happens.
        cure: what a person can do about it.
    """

    versions: tuple[str, ...]
    families: tuple[str, ...]
    words: str
    says: str
    cure: str


NAMELESS_HEAD = Defect(
    versions=("0.32.0",),
    families=("exaone_moe", "hy_v3"),
    words="",
    says="it builds a head without a name, so no entry can except it from quantization",
    cure="Export with compressed-tensors instead of modelopt: its targets pass over heads",
)

DEFECTS = (
    Defect(
        versions=("0.32.0",),
        families=("step3p5", "step3p7"),
        words=r"IndexError: .*models/step3p5\.py",
        says="it cuts layer_types to the decoder layers, then looks up the draft's layer behind them",
        cure="Serve without method=mtp, or with a later vLLM: nothing in the checkpoint helps",
    ),
    Defect(
        versions=("0.32.0",),
        families=("step3p5", "step3p7"),
        words=r"falsely use random initialization",
        says="it demands scales of the KV cache that compressed-tensors gives it as constants",
        cure="Add model.layers.N.self_attn.attn.{q,k,v}_scale (1) and _zero_point (0) for the MTP layers",
    ),
    Defect(
        versions=("0.32.0",),
        families=("step3p7", "step3p5"),
        words=r"AmbiguousGlobalPerLayerAttributeError",
        says="it reads a number of heads that transformers' own config class keeps by layer",
        cure="Keep the release's configuration_step3p7.py and auto_map, and serve with --trust-remote-code",
    ),
    Defect(
        versions=("0.32.0",),
        families=("nemotron_h",),
        words=r"AttributeError: .*'vit_hidden_size'.*nano_nemotron_vl\.py",
        says="it reads a key that transformers' own config class of Nemotron Omni has under another name",
        cure="Keep the release's configuration file and auto_map, and serve with --trust-remote-code",
    ),
    Defect(
        versions=("0.32.0",),
        families=("nemotron_h",),
        words=r"TypeError: CompressedTensorsConfig\.__init__\(\) missing",
        says="it makes the config of Nemotron Omni's draft of text_config, without the quantization_config",
        cure="Copy quantization_config into text_config (llm_config) of config.json as well",
    ),
    Defect(
        versions=("0.32.0",),
        families=("qwen4_exp",),
        words=r"'Qwen4ExpQSAQKVIndexerLinear' object has no attribute",
        says="under modelopt's NVFP4 it builds attention with an indexer plain, whatever the checkpoint holds",
        cure="Leave that attention in BF16, or export with compressed-tensors",
    ),
    Defect(
        versions=("0.32.0",),
        families=("kimi_k3",),
        words=r"object has no attribute 'weight'.*kimi_k3/nvidia/kda\.py",
        says="it pads the delta net's fused projection through a weight that a packed one does not have",
        cure="Keep linear attention in BF16, or serve with a TP size at which nothing is padded",
    ),
    Defect(
        versions=("0.32.0",),
        families=("minimax_m3_vl",),
        words=r"AssertionError.*parameter\.py:117",
        says="a fused attention projection with index_q and index_k takes no scheme with one scale a tensor",
        cure="Keep attention in BF16, or quantize it by channel or block (FP8_DYNAMIC, FP8_BLOCK)",
    ),
)


def known_defect(failure: LoadFailure, *, family: str, version: str) -> Defect | None:
    """The known defect that caused a failure; None if there is none."""
    text = f"{failure.type}: {failure.words} [{failure.at}]"
    for defect in DEFECTS:
        is_concerned = version in defect.versions and (not defect.families or family in defect.families)
        if is_concerned and re.search(defect.words, text, re.DOTALL):
            return defect
    return None
