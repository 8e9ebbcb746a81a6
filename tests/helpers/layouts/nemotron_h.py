"""NVIDIA-Nemotron-3-Super-120B-A12B-BF16 as nvidia publishes it.

Names of backbone and MTP block: the tensor list of the release that paramcalc's generator reads
(scripts/generate-presets-from-model.js, buildNemotronEntry: every module of `mtp.layers.0` and
`mtp.layers.1` by name, 512 experts), the backbone also as transformers' save_pretrained writes it.
Config: quoted whole in several projects.
"""

from tensors import Config, Tensors, embeddings, linear, norms, table, under


def nemotron_h(config: Config) -> Tensors:
    """One mixer a layer, by the letters of the pattern; the MTP layer likewise, glue first and norm
    last.
    """
    hidden, last = config["hidden_size"], len(config["mtp_hybrid_override_pattern"]) - 1
    mixers = {
        "M": table("nemotron_h.mamba", config),
        "*": table("nemotron_h.attention", config),
        "E": table("nemotron_h.experts", config),
    }
    layers = {
        kind: under("mixer.", mixer) | norms("norm", hidden) for kind, mixer in mixers.items()
    }
    tensors = embeddings(config, "backbone.embeddings", "lm_head", "backbone.norm_f")
    for index, kind in enumerate(config["hybrid_override_pattern"]):
        tensors |= under(f"backbone.layers.{index}.", layers[kind])
    for index, kind in enumerate(config["mtp_hybrid_override_pattern"]):
        first = (
            linear("eh_proj", hidden, 2 * hidden) | norms("enorm hnorm", hidden)
            if index == 0
            else {}
        )
        end = norms("final_layernorm", hidden) if index == last else {}
        tensors |= under(f"mtp.layers.{index}.", layers[kind] | first | end)
    return tensors


LAYOUTS = {"nemotron_h": nemotron_h}
