"""DeepSeek-V4 Flash and Pro: fused latent attention with compressors, hyper-connections, MTP under
`mtp.{i}`.

vLLM 0.32.0: models/deepseek_v4/nvidia/{model,mtp}.py. The released weights are FP8 in 128x128
blocks and MXFP4 experts, scales in `.scale` (ue8m0). The draft is constructed as
`model.layers.{num_hidden_layers + i}`: entries in the names on disk (`mtp.0.*`) never match.
Compressors and the indexer's projections are built without a quantization config. vLLM before 0.32
asked for experts as gate_proj/up_proj/down_proj, 0.32 asks for w1/w3/w2.
"""

from ..family import Alias, Draft, Family, Layout, Loader, Renames, Row, Stem
from ._blocks import EMBEDDING, HEAD, NORM, ROUTER, fused, kept, plain, routed_experts

COMPRESSOR = "vLLM builds fused_wkv_wgate without a quantization config"
HYPER_CONNECTION = "float32 parameters of the hyper-connections"

FAMILY = Family(
    model_type="deepseek_v4",
    layouts={
        "*": Layout(
            layers=Stem(disk="layers.{i}.", runtime="model.layers.{i}."),
            mtp=Stem(disk="mtp.{i}.", runtime="model.layers.{n}."),
            top=(
                Row(path="embed", role="embedding", runtime="model.embed_tokens", why_kept=EMBEDDING,
                    loads_quantized=False),
                Row(path="head", role="head", runtime="lm_head", why_kept=HEAD),
                *kept("norm", NORM, "norm"),
                *kept("state", HYPER_CONNECTION, "hc_head_fn", "hc_head_base", "hc_head_scale"),
            ),
            head="head.weight",
            renames=Renames(
                substrings=((".shared_experts.w2", ".shared_experts.down_proj"),),
                prefixes=(("layers.", "model.layers."), ("embed.", "model.embed."), ("norm.", "model.norm."),
                          ("hc_head", "model.hc_head"), ("mtp.", "model.mtp.")),
            ),
        ),
    },
    block=(
        *fused("attn.fused_wqa_wkv", "attn.wq_a", "attn.wkv", role="attention"),
        *plain("attention", "attn.wq_b", "attn.wo_a", "attn.wo_b"),
        *kept("norm", NORM, "attn.q_norm", "attn.kv_norm", "attn_norm", "ffn_norm"),
        *kept("state", "one value a head", "attn.attn_sink"),
        *(
            Row(path=f"attn.{stem}compressor.{name}", role="compressor", why_kept=COMPRESSOR, loads_quantized=False,
                runtime=f"attn.{stem}compressor.fused_wkv_wgate")
            for stem in ("", "indexer.") for name in ("wkv", "wgate")
        ),
        *kept("norm", NORM, "attn.compressor.norm", "attn.indexer.compressor.norm"),
        *kept("state", "position bias of the compressor", "attn.compressor.ape", "attn.indexer.compressor.ape"),
        *kept("indexer", "its scores pick the keys to read", "attn.indexer.wq_b", loads_quantized=True),
        *kept("indexer", "vLLM builds it without a quantization config", "attn.indexer.weights_proj"),
        *routed_experts("ffn.experts", "w1", "w3", "w2", aliases=True),
        *fused("ffn.shared_experts.gate_up_proj", "ffn.shared_experts.w1", "ffn.shared_experts.w3",
               role="shared_experts"),
        Row(path="ffn.shared_experts.w2", role="shared_experts", runtime="ffn.shared_experts.down_proj"),
        *kept("router", ROUTER, "ffn.gate"),
        *kept("state", HYPER_CONNECTION,
              *(f"hc_{part}_{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale"))),
    ),
    mtp_block=(
        *kept("glue", "joins embedding and hidden state for the whole draft", "e_proj", "h_proj",
              loads_quantized=True),
        *kept("norm", NORM, "enorm", "hnorm", "norm"),
        *kept("state", HYPER_CONNECTION, "hc_head_fn", "hc_head_base", "hc_head_scale"),
        Row(path="emb.tok_emb", role="embedding", runtime="embed_tokens", why_kept=EMBEDDING, loads_quantized=False),
        Row(path="head", role="head", why_kept=HEAD),
    ),
    aliases=(
        Alias(path="emb.tok_emb.weight", source="embed.weight",
              reason="vLLM before 0.32 reads the draft's embedding only here; without it acceptance " "is 0 % in silence"),
        Alias(path="head.weight", source="head.weight",
              reason="vLLM before 0.32 reads the draft's head only here; without it acceptance is 0 " "% in silence"),
    ),
    loader=Loader(
        refuses_missing_mtp=True, backbone_takes_kv_scales=False, needs=("compress_ratios", "num_hash_layers"),
        missing_count="AttributeError",
    ),
    config_extras={"scale_fmt": "ue8m0"},
    draft=Draft(
        model_type="deepseek_v4", classes="DeepseekV4", rope_types=("main", "compress"),
        layers=({"layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]},), projections=("e_proj", "h_proj"),
        final_norm="norm", zeroes_first=True, chains_normed=False, reads_normed=False, streams="hc_mult",
        collapse=("DeepseekV4HyperHead", "hc_", "hc_head_"), proof="vllm, attention by a reference",
    ),
    notes="on disk mtp.{i}, in vLLM model.layers.{num_hidden_layers + i}; embedding and head " "copies are added",
)  # fmt: skip
