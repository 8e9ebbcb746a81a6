"""A packed embedding or head: which families, forms, dialects and versions of vLLM take one.

    make docs        loads all of them, and writes docs/tables/heads.md

In: a model, the group, its word, a dialect. Out: what keepmtp writes, or its refusal; and what vLLM
says of it on pretended GPUs.
"""

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
from pages import table, with_part

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
    lines = []
    for (family, format), row in sorted(rows.items()):
        lines.append([family, format, *(row.get(name, "") for name in names)])
    summed = ", ".join(f"{cell}: {count}" for cell, count in counts.most_common())
    return f"{summed}\n\n{table(['family', 'dialect', *names], lines)}"


def main() -> None:
    """`make docs`."""
    vllms, _ = had_vllms(VERSIONS, find_vllm())
    told = run(places(), vllms, ("sm90", "sm100"))
    for place, answers in told.items():
        for version, why in answers.items():
            if why:
                print(*place, version, why, sep="  ")
    DOCS.write_text(with_part(DOCS, markdown(told)))


if __name__ == "__main__":
    main()
