"""MiMo-7B: dense, Qwen2-like, MTP layers under `model.mtp_layers.{i}`.

vLLM 0.32.0: model_executor/models/mimo_mtp.py. Easy to get wrong: the draft constructs its block as
`model.layers.{num_hidden_layers + i}`, so an ignore list in the names on disk matches nothing. Then
W4A16 fails to load, and FP8 serves at 0 % acceptance in silence. The decoder layers are Qwen2's
(mimo.py inherits from qwen2.py).
"""

from ..family import Draft, Family, Layout, Loader, Renames, Stem
from ._blocks import EH_PROJ_IS_NN_LINEAR, GQA, NORM, NORMS, TOP, gated_mlp, kept

FAMILY = Family(
    model_type="mimo",
    layouts={
        "*": Layout(
            layers=Stem(disk="model.layers.{i}.", runtime="model.layers.{i}."),
            mtp=Stem(disk="model.mtp_layers.{i}.", runtime="model.layers.{n}."),
            top=TOP,
            renames=Renames(),
        ),
    },
    block=(*GQA, *gated_mlp("mlp", "dense_mlp"), *NORMS),
    mtp_block=(
        *kept("glue", EH_PROJ_IS_NN_LINEAR.replace("eh_proj", "input_proj"), "input_proj"),
        *kept("norm", NORM, "token_layernorm", "hidden_layernorm", "final_layernorm"),
    ),
    loader=Loader(unknown_name="ValueError", draft_kv_names="own"),
    draft=Draft(
        model_type="qwen2",
        classes="Qwen2",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projections=("input_proj",),
        hidden_first=True,
        final_norm="final_layernorm",
        zeroes_first=True,
        chains_normed=True,
        reads_normed=False,
        proof="vllm",
    ),
    built_as="qwen2",
    notes="on disk model.mtp_layers.{i}, in vLLM model.layers.{num_hidden_layers + i}",
)
