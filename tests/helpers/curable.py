"""Who cures which of the broken checkpoints: fix, graft, or nothing here.

In: BROKEN, by the starts of its names. Out: `CURED` by fix, `GRAFTED`, `NOT_CURED`.
"""

from broken import BROKEN

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
    "M2 ",
    "R7 GPTQ with an order",
    "R7 Quark in a scheme",
)
# vLLM has no such form in modelopt's dialect, and convert wants a checkpoint that vLLM reads as it is.
NOT_IN_MODELOPT = (
    "R7 FP8 blocks of experts",
    "R7 FP8 a channel",
    "R7 an algorithm of experts",
    "R7 mixed FP8 a channel",
)
THE_RELEASE = (
    "E6 ",
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
NOT_CURED = [case for case in BROKEN if case.name.startswith((*QUANTIZE_ANEW, *NOT_IN_MODELOPT, *THE_RELEASE))]
