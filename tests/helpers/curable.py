"""Who cures which of the broken checkpoints: fix, graft, or nothing here.

In: BROKEN, by the starts of its names. Out: `CURED` by fix, `GRAFTED`, `NOT_CURED`; and the release
of a checkpoint.
"""

from functools import cache
from pathlib import Path

import releases
from broken import BROKEN
from checkpoint_files import write
from dry_corpus import TWINS
from good import released
from keepmtp.checkpoints.source import open_source
from keepmtp.cure.graft import refuse_another_model
from keepmtp.recipes.errors import KeepMTPError
from written_values import fill

# What the others need, by the start of the case's name.
GRAFT = (
    "F1 dropped",
    "F3 dropped",
    "F5 only the glue",
    "F10 vision-language, stripped",
    "R1 neither",
    "F2 ",
    "M1 eh_proj lost",
    "F8 o_proj of the draft",
    "E7 ",
    "E2 one expert of the draft",
    "F42 ",
    "H7 ",
    "F12 mtp.fc packed",
    "E9 ",
    "R7 scale without weight",
    "R7 a scale the draft's loader",
    "R7 orphan scale",
    "R2 eight bits",
    "R15 ",
)
QUANTIZE_ANEW = (
    "E8 ",
    "M1 norm of a decoder",
    "E2 experts of one rank",
    "M1 scale of",
    "R3 one expert",
    "F8 global scale",
    "Fp7 ",
    "G5 ",
    "R4 ",
    "Fp1 global scale with two",
    "Fp2 block scales in BF16",
    "M2 ",
    "R7 GPTQ with an order",
    "R7 Quark in a scheme",
)
# vLLM has no such form in modelopt's dialect, and convert wants a checkpoint that vLLM reads as it
# is.
NOT_IN_MODELOPT = (
    "R7 FP8 blocks of experts",
    "R7 FP8 a channel",
    "R7 an algorithm of experts",
    "R7 mixed FP8 a channel",
)
THE_RELEASE = (
    "E6 ",
    "E10 ",
    "M8 ",
    "R6 shard cut short",
    "R8 a family",
    "R8 a dialect",
    "R2 GPTQ in 8 bits",
    "R7 algorithm vLLM does not load",
    "R7 AutoRound in groups",
    "R7 Quark without",
    "R2 no quantization config",
    "F7 ",
)
OTHERS = (*GRAFT, *QUANTIZE_ANEW, *NOT_IN_MODELOPT, *THE_RELEASE)
CURED = [case for case in BROKEN if not case.name.startswith(OTHERS)]
GRAFTED = [case for case in BROKEN if case.name.startswith(GRAFT)]
NOT_CURED = [
    case
    for case in BROKEN
    if case.name.startswith((*QUANTIZE_ANEW, *NOT_IN_MODELOPT, *THE_RELEASE))
]


@cache
def _release(model: str, place: Path, *, is_filled: bool) -> Path:
    if not is_filled:
        return write(place / "releases" / model, released(model))
    fill(_release(model, place, is_filled=False))
    return _release(model, place, is_filled=False)


def release_of(folder: Path, place: Path) -> Path:
    """The release that a checkpoint was made from, by graft's own comparison; with values, and
    written once.
    """
    of_type = open_source(folder).config["model_type"]
    for model in (
        name for name, config in releases.MODELS.items() if config["model_type"] == of_type
    ):
        if model in TWINS:
            continue
        try:
            refuse_another_model(
                open_source(folder), open_source(_release(model, place, is_filled=False))
            )
        except KeepMTPError:
            continue
        return _release(model, place, is_filled=True)
    raise LookupError(folder)
