"""Gemma 4's assistants (google/gemma-4-26B-A4B-it-assistant): the draft alone, and a target to try
it with.

Names and shapes: transformers' save_pretrained, of the target too. The config: as a public engine
demands it of the official file, which also tells the size of the 12B model's assistant
(backbone_hidden_size 3840): 845,713,928 bytes, as this layout has it.
"""

from tensors import Config, Tensors, gated_mlp, linear, norms, under

FOUR_NORMS = (
    "input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm"
)


def gemma4_assistant(config: Config) -> Tensors:
    """The draft: queries alone, two projections to and from the target's width; the head is the
    embedding.
    """
    text = config["text_config"]
    hidden, outside = text["hidden_size"], config["backbone_hidden_size"]
    tensors = (
        linear("model.embed_tokens", text["vocab_size"], hidden) | norms("model.norm", hidden)
        | linear("pre_projection", hidden, 2 * outside) | linear("post_projection", outside, hidden)
    )  # fmt: skip
    for layer, kind in enumerate(text["layer_types"]):
        tensors |= under(f"model.layers.{layer}.", _layer(text, kind, queries_only=True))
    return tensors


def target(assistant: Config) -> tuple[Config, Tensors]:
    """config.json and tensors of a language model, text only and two layers deep, that an assistant
    can draft for.
    """
    text = assistant["text_config"] | {
        "architectures": ["Gemma4ForCausalLM"], "hidden_size": assistant["backbone_hidden_size"],
        "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0,
    }  # fmt: skip
    hidden = text["hidden_size"]
    tensors = linear("model.embed_tokens", text["vocab_size"], hidden) | norms("model.norm", hidden)
    for layer, kind in enumerate(text["layer_types"]):
        tensors |= under(f"model.layers.{layer}.", _layer(text, kind, queries_only=False))
    return text, tensors


def _layer(text: Config, kind: str, *, queries_only: bool) -> Tensors:
    hidden, is_full = text["hidden_size"], kind == "full_attention"
    head = text["global_head_dim" if is_full else "head_dim"]
    groups = text["num_global_key_value_heads" if is_full else "num_key_value_heads"]
    q = text["num_attention_heads"] * head
    attention = linear("q_proj", q, hidden) | linear("o_proj", hidden, q) | norms("q_norm", head)
    if not queries_only:
        attention |= linear("k_proj", groups * head, hidden) | norms("k_norm", head)
        attention |= (
            {} if is_full and text["attention_k_eq_v"] else linear("v_proj", groups * head, hidden)
        )
    return (
        under("self_attn.", attention) | gated_mlp("mlp", hidden, text["intermediate_size"]) | norms(FOUR_NORMS, hidden)
        | {"layer_scalar": ("BF16", (1,))}
    )  # fmt: skip


LAYOUTS = {"gemma4_assistant": gemma4_assistant}
