"""Releases whose keys or forms differ from those of their family's layout: real keys, over tiny shapes.

In: nothing. Out: a `Checkpoint` each. Where the keys come from stands at each one.
"""

from checkpoint_files import Checkpoint
from good import released

_KINDS = {"M": "mamba", "*": "attention", "E": "moe"}


def nemotron_ultra() -> Checkpoint:
    """NVIDIA-Nemotron-3-Ultra-550B-A55B: `layers_block_type` and `mtp_layers_block_type`, no count, no patterns.

    Keys: those that transformers' NemotronHConfig writes since 5.0 (configuration_nemotron_h.py, where
    num_hidden_layers is deprecated), as in nvidia's repositories of Nemotron 3 Ultra and 3.5 Lightning. Names are those
    of Super.
    """
    checkpoint = released("nemotron-3-super")
    config = checkpoint.config
    del config["num_hidden_layers"]
    config["layers_block_type"] = [_KINDS[kind] for kind in config.pop("hybrid_override_pattern")]
    config["mtp_layers_block_type"] = [_KINDS[kind] for kind in config.pop("mtp_hybrid_override_pattern")]
    return checkpoint
