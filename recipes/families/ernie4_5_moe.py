"""ERNIE 4.5 with routed experts: grouped-query attention, one dense MTP layer in several parts on
disk.

vLLM 0.32.0: model_executor/models/ernie45_moe.py, ernie_mtp.py. Easy to get wrong: on disk the
block is `model.mtp_block.0`, and its glue and norms are in other modules
(`model.mtp_linear_proj.0`). The draft constructs the block as `model.layers.{num_hidden_layers}`
and maps no second layer. Its decoder layer is Llama's: dense, though the model has experts.
"""

from ..family import Draft, Family, Layout, Loader, Row, Stem
from ._blocks import DEEPSEEK_MLP, EH_PROJ_IS_NN_LINEAR, GQA, NORM, NORMS, ROUTER, TOP, kept

FAMILY = Family(
    model_type="ernie4_5_moe",
    layouts={
        "*": Layout(
            layers=Stem(disk="model.layers.{i}.", runtime="model.layers.{i}."),
            mtp=Stem(disk="model.mtp_block.{i}.", runtime="model.layers.{n}."),
            top=TOP,
            mtp_top=(
                *kept(
                    "glue",
                    EH_PROJ_IS_NN_LINEAR.replace("eh_proj", "mtp_linear_proj"),
                    "model.mtp_linear_proj.0",
                ),
                *kept("norm", NORM, "model.mtp_emb_norm.0", "model.mtp_hidden_norm.0"),
            ),
        ),
    },
    block=(
        *GQA,
        *DEEPSEEK_MLP,
        # A row [1, experts], not a matrix. The path is the full name, so that no list of modules
        # has it.
        Row(
            path="mlp.moe_statics.e_score_correction_bias",
            role="router",
            why_kept=ROUTER,
            loads_quantized=False,
        ),
        *NORMS,
    ),
    loader=Loader(unknown_name="ValueError", draft_kv_names="own", missing_count="AttributeError"),
    # vLLM's draft is Llama's layer. Its rotary embedding pairs other dimensions than the
    # backbone's.
    draft=Draft(
        model_type="llama",
        classes="Llama",
        embedding_norm="model.mtp_emb_norm.0",
        hidden_norm="model.mtp_hidden_norm.0",
        projections=("model.mtp_linear_proj.0",),
        final_norm="",
        zeroes_first=True,
        chains_normed=False,
        proof="vllm",
    ),
    notes="on disk model.mtp_block.0, in vLLM model.layers.{num_hidden_layers}; vLLM drafts with "
    "one layer",
)
