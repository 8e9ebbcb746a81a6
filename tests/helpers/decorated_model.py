"""A foreign checkpoint: MiMo's names on disk and its own Python beside them, in three forms.

In: a folder. Out: config.json with `auto_map`, configuration_mimo.py, modeling_mimo.py, and weights
as a trained model has them, so that activations stay of a size: norms near one, linears near
1/sqrt(K).

The Python is built as MiMo builds it: transformers' Qwen2, whose backbone also holds the MTP layers
and never calls them.
"""

from pathlib import Path
from typing import Literal

import torch
from releases import source_layout, write_checkpoint
from safetensors.torch import save_file

Form = Literal["plain", "decorated", "with"]

SMALL = {
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}

CONFIGURATION = """
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"

    def __init__(self, *args, num_nextn_predict_layers=0, **kwargs):
        self.num_nextn_predict_layers = num_nextn_predict_layers
        super().__init__(*args, **kwargs)
"""

MODELING = """
import torch
from torch import nn
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention, Qwen2DecoderLayer, Qwen2ForCausalLM, Qwen2MLP, Qwen2Model, Qwen2RMSNorm,
)

from .configuration_mimo import MiMoConfig


class MiMoDecoderLayer(Qwen2DecoderLayer):
{forward}

class MiMoMTPLayers(nn.Module):
    def __init__(self, config):
        super().__init__()
        for norm in ("input", "post_attention", "token", "hidden", "final"):
            setattr(self, norm + "_layernorm", Qwen2RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.self_attn = Qwen2Attention(config, layer_idx=0)
        self.mlp = Qwen2MLP(config)


class MiMoModel(Qwen2Model):
    config_class = MiMoConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(MiMoDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.mtp_layers = nn.ModuleList(MiMoMTPLayers(config) for _ in range(config.num_nextn_predict_layers))
        self.post_init()


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig
    _no_split_modules = ["MiMoDecoderLayer"]

    def __init__(self, config):
        super(Qwen2ForCausalLM, self).__init__(config)
        self.model = MiMoModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
"""

FORWARDS = {
    "plain": """
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
""",
    # As DeepSeek's reference model.py decorates its MTP block.
    "decorated": """
    @torch.inference_mode()
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)
""",
    "with": """
    def forward(self, *args, **kwargs):
        with torch.inference_mode():
            hidden_states = super().forward(*args, **kwargs)
        return hidden_states.clone()
""",
}


def write_foreign(folder: Path, form: Form) -> Path:
    """Write the checkpoint; the same weights in every form."""
    config, tensors = source_layout("mimo-7b", changes=SMALL)
    write_checkpoint(folder, config, tensors, num_shards=1)
    rng = torch.Generator().manual_seed(0)
    weights = {}
    for name, (_, shape) in tensors.items():
        noise = torch.randn(shape, generator=rng)
        weights[name] = (
            1 + 0.1 * noise if "norm" in name else noise * shape[-1] ** -0.5
        ).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "configuration_mimo.py").write_text(CONFIGURATION)
    (folder / "modeling_mimo.py").write_text(
        MODELING.format(forward=FORWARDS[form].strip("\n") + "\n")
    )
    return folder
