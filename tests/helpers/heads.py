"""A packed embedding or head: which families, forms, dialects and versions of vLLM take one.

    make docs        loads all of them, and writes docs/tables/heads.md

In: a model, the group, its word, a dialect. Out: what keepmtp writes, or its refusal; and what vLLM
says of it on pretended GPUs.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import matrix
import releases
from checkpoint_files import Checkpoint
from commands import ROOT
from dry_corpus import SEPARATE, TWINS
from good import with_packed
from keepmtp.recipes.conventions import ALGORITHMS, FORMATS, Format
from keepmtp.recipes.families import find_family
from keepmtp.validate.dryload.versions import had_vllms
from keepmtp.validate.facts.dry_load import GPU
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm

MODELS = [model for model in releases.MODELS if model not in (*TWINS, *SEPARATE)]
FORMS = {
    "head": ("FP8_DYNAMIC", "FP8_BLOCK", "W8A16", "W4A16", "NVFP4A16", "NVFP4", "MXFP4A16"),
    "embedding": ("W8A16", "W4A16"),
}
VERSIONS = ("0.32.0", "0.33.0")
DOCS = ROOT / "docs" / "tables" / "heads.md"
_PLAIN = ("", "")
Place = tuple[str, Format, str, str]
"""Model, dialect, group, word."""


def places(models: Iterable[str] = MODELS) -> list[Place]:
    """Every combination that has a word in its dialect, and the same with both plain."""
    found = list[Place]()
    for model in models:
        for format in FORMATS:
            found.append((model, format, *_PLAIN))
            for group, words in FORMS.items():
                for word in words:
                    if format == "compressed-tensors" or word in ALGORITHMS:
                        found.append((model, format, group, word))
    return found


def run(
    asked: Sequence[Place], vllms: Iterable[VLLM], gpus: Sequence[GPU]
) -> dict[Place, dict[str, str]]:
    """What each version says of each combination: "" where it loads on all GPUs, else why not; and
    under "plan" keepmtp's refusal.
    """
    told: dict[Place, dict[str, str]] = defaultdict(dict)
    for vllm in vllms:
        for (*place, _, _), text in matrix.run(asked, gpus, (1,), vllm, _checkpoint).items():
            answers = told[tuple(place)]
            if text.startswith(matrix.REFUSED):
                answers["plan"] = text
            elif text.startswith(matrix.LOADS):
                answers.setdefault(vllm.version, "")
            else:
                answers[vllm.version] = answers.get(vllm.version) or text
    return told


def _checkpoint(model: str, format: Format, group: str, word: str) -> Checkpoint:
    return with_packed(model, group, word, format)


def markdown(told: dict[Place, dict[str, str]]) -> str:
    """A row for each family and dialect."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    counts = Counter[str]()
    for (model, format, group, word), answers in told.items():
        if not group:
            continue
        plain = told[model, format, *_PLAIN]
        cell = "-"
        if "plan" not in answers:
            loads = [version for version, why in answers.items() if not why]
            is_as_plain = all(plain.get(version) == why for version, why in answers.items() if why)
            cell = ", ".join(loads) or "no"
            if len(loads) == len(answers):
                cell = "yes"
            elif is_as_plain:
                cell = "as plain"
        counts[cell] += 1
        family = find_family(releases.MODELS[model], model).model_type
        row = rows.setdefault((family, format), {})
        # Of several models of a family the first that does not simply load.
        name = f"{group} {word}"
        if row.get(name, "yes") == "yes":
            row[name] = cell
    names = [f"{group} {word}" for group, words in FORMS.items() for word in words]
    lines = [f"| family | dialect | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for (family, format), row in sorted(rows.items()):
        cells = " | ".join(row.get(name, "") for name in names)
        lines.append(f"| {family} | {format} | {cells} |")
    summed = ", ".join(f"{cell}: {count}" for cell, count in counts.most_common())
    return f"""\
# Packed heads and embeddings

Written by `make docs`: what keepmtp writes with `head` or `embedding` in a recipe's backbone, loaded by the classes
of vLLM {" and ".join(VERSIONS)} for target and draft on meta tensors, for sm90 and sm100, from tiny checkpoints in published
names. *yes*: both versions load and fill all of it on both GPUs, and the draft gets the target's; of step3p5 with
keepmtp's cures of vLLM's defects. A version: that one alone. *as plain*: what stops it stops a plain one too
([matrix.md](matrix.md)). *-*: keepmtp refuses it and names vLLM's file. Nothing: the dialect has no word for it.

{summed}

{chr(10).join(lines)}
"""


def main() -> None:
    """`make docs`."""
    vllms, _ = had_vllms(VERSIONS, find_vllm())
    told = run(places(sys.argv[1:] or MODELS), vllms, ("sm90", "sm100"))
    for place, answers in told.items():
        for version, why in answers.items():
            if why:
                print(*place, version, why, sep="  ")
    text = markdown(told)
    if sys.argv[1:]:
        print(text)
    else:
        DOCS.write_text(text)


if __name__ == "__main__":
    main()
