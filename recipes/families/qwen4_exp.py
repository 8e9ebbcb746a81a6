"""Qwen3.8-Flash-Next (qwen4_exp): delta nets, attention with an indexer, hyper-connections,
experts, MTP under `mtp.*`.

vLLM 0.32.0: models/qwen4_exp/nvidia/{model,qsa,mtp}.py. The draft's layers are constructed as
`mtp.layers.{num_hidden_layers + i}`. Under modelopt vLLM adds num_hidden_layers to the layer of
each `mtp.` entry, under compressed-tensors it does not: there an entry needs the number at run
time. The indexer's projection is part of qkv_proj. The draft reads config.json again. The n-gram
table is BF16, or FP8 with one scale for all of its parts (Qwen3.8-Flash-Next-FP8;
common/ngram_embedding.py, Qwen4ExpPLEFp8EmbeddingMethod).
"""

from dataclasses import replace

from ..family import Draft, Family, Layout, Loader, Row, Stem
from ._blocks import NORM, fused, kept, plain
from .qwen3_5 import LINEAR_ATTENTION, TEXT, VISION_LANGUAGE
from .qwen3_next import FC, QWEN_MOE

HYPER_CONNECTION = "vLLM builds the hyper-connections without a quantization config"
TABLE = "rows of the n-gram table are looked up, not multiplied"
TABLE_SCALE = "ple.ple_embedding.ngram_embedding.weight_scale"
PLE = "joins the n-gram table with every residual stream: small, and everything passes through it"


def _connection(name: str, down: str) -> tuple[Row, ...]:
    """A hyper-connection; `down` is what vLLM builds of the rows that go down to the low rank."""
    return (
        *(
            Row(path=f"{name}.{path}", role="state", runtime=f"{name}.{down}", why_kept=HYPER_CONNECTION,
                loads_quantized=False)
            for path in ("input_mix_weight_down", "block_inject_weight")
        ),
        *kept("state", HYPER_CONNECTION, f"{name}.input_mix_weight_up"),
        *kept("norm", NORM, f"{name}.hc_norm"),
    )  # fmt: skip


def _mixer(name: str) -> tuple[Row, ...]:
    return _connection(name, "input_mix_weight_down")


PLE_ROWS = (
    *(Row(path=f"ple.{name}", role="state", runtime="ple.kv_proj", why_kept=PLE)
      for name in ("key_proj", "value_proj")),
    *(Row(path=f"ple.ple_embedding.ngram_embedding.shard_{part}", role="embedding",
          runtime="ple.ple_embedding.ngram_embedding", why_kept=TABLE, loads_quantized=False, table_scale=TABLE_SCALE)
      for part in range(512)),
    *kept("state", "one scale for the whole n-gram table", TABLE_SCALE),
    *kept("state", "constants of the n-gram table's hashes", "ple.ple_embedding.layer_multipliers",
          "ple.ple_embedding.ngram_heads_offsets", "ple.ple_embedding.ngram_heads_vocab_sizes"),
    *kept("state", "a convolution over time", "ple.conv1d"),
    *kept("norm", NORM, "ple.norm_conv", "ple.norm_key", "ple.norm_query"),
)  # fmt: skip
DOWN = "input_mix_weight_down_block_inject"
MTP = Stem(disk="mtp.layers.{i}.", runtime="mtp.layers.{n}.")
MTP_TOP = (
    *kept("glue", FC, "mtp.fc_embedding", "mtp.fc_hidden", loads_quantized=True),
    *kept("norm", NORM, "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
    *_mixer("mtp.hyper_connection_mixer"),
)
FAMILY = Family(
    model_type="qwen4_exp",
    also=("qwen4_exp_text",),
    layouts={
        "Qwen4ExpForCausalLM": Layout(
            layers=TEXT.layers,
            mtp=MTP,
            top=(*TEXT.top, *_mixer("model.hyper_connection_mixer")),
            mtp_top=MTP_TOP,
            renames=TEXT.renames,
        ),
        "*": Layout(
            layers=VISION_LANGUAGE.layers,
            mtp=MTP,
            top=(*VISION_LANGUAGE.top, *_mixer("model.language_model.hyper_connection_mixer")),
            mtp_top=MTP_TOP,
            opaque=VISION_LANGUAGE.opaque,
            renames=VISION_LANGUAGE.renames,
            draft_reads_afresh=True,
            draft_renumbers=True,
        ),
    },
    block=(
        *fused("self_attn.qkv_proj", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
               "self_attn.indexer.index_qk_proj", role="attention"),
        *plain("attention", "self_attn.o_proj"),
        *kept("norm", NORM, "self_attn.q_norm", "self_attn.k_norm", "self_attn.indexer.q_layernorm",
              "self_attn.indexer.k_layernorm"),
        *LINEAR_ATTENTION,
        *QWEN_MOE,
        *_connection("attn_hyper_connection", DOWN),
        *_connection("mlp_hyper_connection", DOWN),
        *(replace(row, in_every_layer=False) for row in PLE_ROWS),
    ),
    mtp_count_keys=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
    mtp_count_default=1,
    loader=Loader(unknown_name="ValueError"),
    # In vLLM later steps reuse the keys that the indexer chose at the first one; here each step
    # chooses.
    modelopt_by_module=True,
    draft=Draft(
        model_type="qwen4_exp_text", classes="Qwen4ExpText", position_axes=3,
        layers=({"layer_types": ["qwen_sparse_attention"], "ple_layer_ids": []},),
        embedding_norm="mtp.pre_fc_norm_embedding", hidden_norm="mtp.pre_fc_norm_hidden",
        projections=("mtp.fc_embedding", "mtp.fc_hidden"), final_norm="", zeroes_first=False, chains_normed=False,
        reads_normed=False, streams="hc_count", joint_norm=True,
        collapse=("Qwen4ExpTextGatedResidual", "", "mtp.hyper_connection_mixer."), can_keep_choice=True,
        proof="source",
    ),
    fp8_table_key="ple_embedding_dtype",
    norms_add_one=True,
    no_fp8_cache="attention of Qwen's own (QSA), which stops at every entry for the KV cache",
    notes="on disk mtp.layers.{i}, in vLLM mtp.layers.{num_hidden_layers + i}",
)  # fmt: skip
