"""GLM-OCR: dense GLM-4 inside a vision-language model, gate and up fused on disk, one inlined MTP
layer.

vLLM 0.32.0: model_executor/models/glm_ocr.py, glm4.py, glm_ocr_mtp.py. On disk the MTP layer
continues the decoder layers (`model.language_model.layers.{N}`), in vLLM it is `model.layers.{N}`:
entries for the draft must have that name. Its loader drops an unknown `.weight_scale` in silence
and would load a quantized eh_proj as raw bytes.
"""

from ..family import Draft, Family, Layout, Loader, Renames, Row, Stem
from ._blocks import DEEPSEEK_MTP, EMBEDDING, GQA, HEAD, NORM, NORMS, kept, plain

FAMILY = Family(
    model_type="glm_ocr",
    layouts={
        "*": Layout(
            layers=Stem(disk="model.language_model.layers.{i}.", runtime="language_model.model.layers.{i}."),
            mtp=None,
            mtp_runtime="model.layers.{i}.",
            top=(
                Row(path="model.language_model.embed_tokens", role="embedding",
                    runtime="language_model.model.embed_tokens", why_kept=EMBEDDING, loads_quantized=False),
                Row(path="lm_head", role="head", runtime="language_model.lm_head", why_kept=HEAD),
                *kept("norm", NORM, "model.language_model.norm"),
            ),
            opaque=(("model.visual.", "visual.", "vision"),),
            renames=Renames(prefixes=(
                ("lm_head.", "language_model.lm_head."), ("model.language_model.", "language_model.model."),
                ("model.visual.", "visual."),
            )),
        ),
    },
    block=(
        *GQA,
        *plain("dense_mlp", "mlp.gate_up_proj", "mlp.down_proj"),
        *NORMS,
        *kept("norm", NORM, "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    mtp_block=DEEPSEEK_MTP,
    loader=Loader(drops_scales=True, takes_kv_scales=True, missing_count="AttributeError"),
    draft=Draft(
        model_type="glm_ocr_text", classes="GlmOcr", decoder="GlmOcrTextDecoderLayer",
        rotary="GlmOcrTextRotaryEmbedding", position_axes=3, zeroes_first=True, chains_normed=False, proof="vllm",
    ),
    notes="on disk model.language_model.layers.{num_hidden_layers}, in vLLM " "model.layers.{num_hidden_layers}",
)  # fmt: skip
