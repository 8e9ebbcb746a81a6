"""The static check beside the dry load, tensor by tensor: each broken in each way, in each family.

    nice .venv/bin/python benchmarks/cells.py [--only WORDS] [--list]

In: every family's tiny checkpoint with true headers, as released, quantized in both dialects, and
in those of other tools. Of each kind of tensor one is transposed, halved, stored in other dtypes,
and missing: a cell. Out, on the terminal: how many cells both call good or bad, which the static
check alone calls bad (false alarms), which the dry load alone (missed), which are known to be bad
although a dry load does not show it, and which the dry load finds and no header shows.

Easy to get wrong: there are 20,000 cells, and a load takes a third of a second. So what vLLM does is
kept in build/cells, by form: a run that was ended goes on, and a changed rule of the static check
asks vLLM nothing again.
"""

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from _helpers import ROOT
from checkpoint_files import Checkpoint, as_source, write
from foreign_form import LINEAR_ONLY
from good import ours, released
from good_checkpoints import GOOD
from keepmtp.checkpoints.dialects.runtime_view import RuntimeView
from keepmtp.checkpoints.stored import SCALE_LEAVES, TRANSPOSED_LEAVES
from keepmtp.recipes.conventions import ALGORITHMS
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.family import HFName
from keepmtp.recipes.frozen import Shape, without
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.check.check import Checked, examine
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.dryload.verdict_findings import objections
from keepmtp.validate.dryload.versions import had_vllms
from keepmtp.validate.facts.findings import errors_of
from keepmtp.validate.facts.vllm_env import find_vllm
from releases import MODELS

KEPT = ROOT / "build" / "cells"
VERSION, GPU = "0.33.0", "sm90"
HOWS = ("agree", "static alone", "dry alone", "not seen by the dry load", "no header shows it")
# What the static check calls bad with reason, and a dry load cannot tell from what is good.
NOT_SEEN = {
    r"(sinks?|sink_bias|sink_param|A_log|mlp\.gate\.weight) halved$": "the rest of the vector "
    "keeps what construction wrote, as padding does",
    r"\.hc_base missing$": "construction writes numbers of its own",
    r"(e_score_correction_bias|shard_\d+\.weight) as F8_E4M3$": "the model's loader casts it first",
    r"\.(qzeros|weight) as U8$": "whole numbers of any width are taken, and codes are no such bytes",
    r"\.weight_shape (missing|halved|as F32)$": "no kernel reads it, and the file is damaged",
}
# What the dry load alone calls bad, and no header can show.
_ALONE = "the only layer of its kind here, with no other to compare it with; a release has several"
NOT_SHOWN = {
    r"attn\.compressor\.(ape|wkv\.weight|wgate\.weight) (halved|transposed)$": _ALONE,
    r"transformer_block\.attn\.[\w.]+ halved$": _ALONE,
    r"layers\.0\.self_attn\.\w+\.weight halved$": _ALONE,
    r"\.shard_1\.weight halved$": "the last part of a table has as many rows as are left",
    r"\.tid2eid as F32$": "whole numbers in F32 are the same numbers",
    r"\.weight_shape as I32$": "no kernel reads it",
}
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E4M3", "F8_E8M0", "U8")
OTHER_DTYPES = {
    "F8_E4M3": ("BF16", "U8"),
    "F8_E8M0": ("U8", "F32"),
    "U8": ("F8_E4M3", "I8"),
    "I8": ("F8_E4M3", "U8"),
    "I32": ("F32", "I64"),
    "I64": ("I32", "F32"),
    "F32": ("BF16", "F8_E4M3"),
    "BF16": ("F32", "F8_E4M3"),
}
# Releases that differ from another one in sizes alone, and drafts without a target.
_LEFT_OUT = ("dsv4-pro", "dsv4-pro-0813", "deepseek-v3.1", "glm-4.5-air", "gemma-4-26b-assistant")
_OTHER_TOOLS = {"gptq", "awq", "autoround", "quark", "native", "mixed"}
_SCALES = {*SCALE_LEAVES, *TRANSPOSED_LEAVES} - {"weight_shape", "qweight", "g_idx"}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Cell:
    """One tensor broken in one way: its dtype and shape then, None where it is missing."""

    tensor: HFName
    broken: str
    spec: tuple[str, Shape] | None

    @property
    def key(self) -> str:
        return f"{self.tensor} {self.broken}"

    def of(self, checkpoint: Checkpoint) -> Checkpoint:
        """The checkpoint with this tensor broken."""
        tensors = dict(checkpoint.tensors)
        del tensors[self.tensor]
        if self.spec is not None:
            tensors[self.tensor] = self.spec
        return replace(checkpoint, tensors=tensors)


def forms() -> Iterator[tuple[str, Checkpoint]]:
    """By name; where the block is plain, it alone is broken."""
    algorithms = [word for word in ALGORITHMS if word not in LINEAR_ONLY]
    builds = dict[str, Callable[[], Checkpoint]]()
    models = [model for model in MODELS if model not in _LEFT_OUT]
    for model in models:
        builds[f"{model}: released"] = partial(released, model)
    for name, build in GOOD.items():
        if not _OTHER_TOOLS.isdisjoint(name.split()):
            builds[name] = build
    for number, model in enumerate(models):
        scheme = [*SCHEMES][number % len(SCHEMES)]
        builds[f"{model}: {scheme}"] = partial(ours, model, scheme, scheme)
    for model in models:
        builds[f"{model}: NVFP4, its block plain"] = partial(ours, model, "NVFP4")
    for number, model in enumerate(models):
        word = algorithms[number % len(algorithms)]
        builds[f"{model}: modelopt {word}"] = partial(ours, model, word, word, format="modelopt")
    for name, build in builds.items():
        try:
            yield name, build()
        except RecipeError:
            continue  # no scheme of keepmtp fits


def cells_of(runtime: RuntimeView, *, is_block: bool) -> Iterator[Cell]:
    """Of each kind of tensor the first, broken in each way."""
    kinds = dict[tuple[str, bool], HFName]()
    for name, entry in runtime.source.entries.items():
        place = runtime.view.place(name)
        is_mtp = runtime.is_mtp_name(name)
        if entry.num_bytes and (is_mtp or not is_block) and (not place or place.role != "vision"):
            kinds.setdefault((_NUMBER.sub("{}", name), is_mtp), name)
    for name in kinds.values():
        dtype = runtime.source.entries[name].dtype
        shape = runtime.source.entries[name].shape
        if len(shape) >= 2 and shape[-1] != shape[-2] and 1 not in shape[-2:]:
            yield Cell(name, "transposed", (dtype, (*shape[:-2], shape[-1], shape[-2])))
        if shape and shape[0] > 1 and shape[0] % 2 == 0:
            yield Cell(name, "halved", (dtype, (shape[0] // 2, *shape[1:])))
        yield Cell(name, "missing", None)
        others = OTHER_DTYPES.get(dtype, ("F32", "F8_E4M3"))
        if name.rpartition(".")[2] in _SCALES:
            others = SCALE_DTYPES
        for other in others:
            if other != dtype:
                yield Cell(name, f"as {other}", (other, shape))


def static_says(checkpoint: Checkpoint, folder: Path, cell: Cell) -> str:
    """The first error of the static check; "" for none."""
    source = as_source(cell.of(checkpoint), folder)
    for error in errors_of(examine(source, vllm=VERSION).data.findings):
        return f"{error.rule} {error.where}: {error.says}"
    return ""


def dry_says(
    base: Checked, folder: Path, checkpoints: Mapping[str, Checkpoint], dry: DryLoader
) -> Iterator[str]:
    """The first error of the dry load of each checkpoint; "" for none.

    Args:
        base: the static check of the form as it is.
        folder: for the checkpoints, which have another tensor than the form, or lack one.
        dry: vLLM's process.
    """
    jobs = []
    for number, checkpoint in enumerate(checkpoints.values()):
        jobs.append(Job(folder=write(folder / str(number), checkpoint), method=base.method))
    for account in dry.load_all(jobs):
        errors = errors_of(finding for finding, *_ in objections(account, base))
        yield "".join(f"{error.where}: {error.says}" for error in errors[:1])


def judged(
    name: str,
    checkpoint: Checkpoint,
    folder: Path,
    dry: Callable[[], DryLoader],
    step: int = 1,
) -> Iterator[tuple[Cell, str, str]]:
    """Each cell of a form, what the static check says of it, and what the dry load says.

    Args:
        dry: starts vLLM, where an answer is not kept.
        step: 2 for every other cell.
    """
    write(folder, checkpoint)
    base = examine(as_source(checkpoint, folder), vllm=VERSION)
    if base.runtime is None or not base.data.ok:
        print(f"{name}: the static check refuses it as it is")
        return
    wanted = [*cells_of(base.runtime, is_block="block plain" in name)][::step]
    text = json.dumps([checkpoint.config, checkpoint.tensors, checkpoint.json_files])
    kept = KEPT / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    said = dict[str, str]()
    if kept.is_file():
        said = json.loads(kept.read_text())
    asked = {"": checkpoint} | {cell.key: cell.of(checkpoint) for cell in wanted}
    asked = without(asked, *said)
    if asked:
        said |= zip(asked, dry_says(base, folder / "cells", asked, dry()), strict=True)
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(said))
    if said.get(""):
        print(f"{name}: vLLM refuses it as it is: {said[''][:150]}")
        return
    for cell in wanted:
        yield cell, static_says(checkpoint, folder, cell), said[cell.key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="forms with these words in their name")
    parser.add_argument("--list", action="store_true", help="every cell on which they part")
    options = parser.parse_args()
    counts = Counter(dict.fromkeys(HOWS, 0))
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        @cache
        def dry() -> DryLoader:
            (vllm,), _ = had_vllms([VERSION], find_vllm())
            return stack.enter_context(DryLoader(vllm, gpu=GPU))

        for number, (name, checkpoint) in enumerate(forms()):
            if options.only not in name:
                continue
            for cell, static, loaded in judged(name, checkpoint, scratch / f"{number}", dry):
                how = "agree"
                if bool(static) != bool(loaded):
                    how = HOWS[1 + (not static)]
                    says = static or loaded
                    known = NOT_SEEN if static else NOT_SHOWN
                    for pattern, reason in known.items():
                        if re.search(pattern, cell.key):
                            how = HOWS[3 + (not static)]
                            says = reason
                    if options.list:
                        print(f"{how}: {name}: {cell.key}: {says[:160]}")
                counts[how] += 1
            sys.stdout.flush()
    for how, count in counts.items():
        print(f"{how}: {count}")


if __name__ == "__main__":
    main()
