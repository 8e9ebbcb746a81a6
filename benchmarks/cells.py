"""The static check beside the dry load, tensor by tensor: each broken in each way, in each family.

    nice .venv/bin/python benchmarks/cells.py [--only WORDS] [--list] [--kept]

In: every family's tiny checkpoint with true headers, as released, quantized in both dialects, and
in those of other tools. Of each kind of tensor one is transposed, halved, stored in other dtypes,
and missing: a cell. Out: a table on the terminal: how many cells both call good or bad, which the
static check alone calls bad (false alarms), which the dry load alone (missed), which are known
to be bad although a dry load does not show it, and which the dry load finds and no header shows.

What vLLM does is kept in build/cells, by form: a run that was ended goes on, and a changed rule of
the static check asks vLLM nothing again.

Easy to get wrong: there are 20,000 cells, and a load takes a third of a second. So a load has many
broken tensors (cells_in_vllm.py), each of another parameter. Where one of them ends it, or a
finding could be of two, those cells are loaded again in smaller groups, at last alone.
"""

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
import releases
from checkpoint_files import Checkpoint, as_source, write
from foreign_form import LINEAR_ONLY
from good import ours, released
from good_checkpoints import GOOD
from keepmtp.checkpoints.dialects.runtime_view import RuntimeView
from keepmtp.checkpoints.stored import SCALE_LEAVES, TRANSPOSED_LEAVES
from keepmtp.recipes.conventions import ALGORITHMS
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.family import HFName
from keepmtp.recipes.frozen import Shape
from keepmtp.recipes.schemes import SCHEMES
from keepmtp.validate.check.check import Checked, examine
from keepmtp.validate.dryload import loader
from keepmtp.validate.dryload.check_on import with_loads
from keepmtp.validate.dryload.loader import DryLoader, Job
from keepmtp.validate.dryload.verdict_findings import objections
from keepmtp.validate.dryload.versions import had_vllms
from keepmtp.validate.facts.dry_load import LoadAccount
from keepmtp.validate.facts.findings import errors_of
from keepmtp.validate.facts.vllm_env import find_vllm

KEPT = Path(__file__).parent.parent / "build" / "cells"
VERSION, GPU = "0.33.0", "sm90"
HOWS = ("agree", "static alone", "dry alone", "not seen by the dry load", "no header shows it")
# What the static check calls bad with reason, and a dry load cannot tell from what is good.
NOT_SEEN = {
    r"(sinks?|sink_bias|sink_param|A_log|mlp\.gate\.weight) halved$": "the rest of the vector "
    "keeps what construction wrote, as padding does",
    r"\.hc_base missing$": "construction writes numbers of its own",
    r"(e_score_correction_bias|shard_\d+\.weight) as F8_E4M3$": "the model's loader casts it first",
    r"\.qzeros as U8$": "whole numbers of any width are taken, and words of codes are no bytes",
}
# What the dry load alone calls bad, and no header can show.
_ALONE = "the only layer of its kind here, with no other to compare it with; a release has several"
NOT_SHOWN = {
    r"attn\.compressor\.(ape|wkv\.weight|wgate\.weight) (halved|transposed)$": _ALONE,
    r"transformer_block\.attn\.[\w.]+ halved$": _ALONE,
    r"layers\.0\.self_attn\.\w+\.weight halved$": _ALONE,
    r"\.shard_1\.weight halved$": "the last part of a table has as many rows as are left",
    r"\.attention_sink_bias missing$": "vLLM's class alone knows which layers have one",
    r"\.tid2eid as F32$": "whole numbers in F32 are the same numbers",
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


def forms() -> Iterator[tuple[str, Checkpoint]]:
    """By name; where the block is plain, it alone is broken."""
    algorithms = [word for word in ALGORITHMS if word not in LINEAR_ONLY]
    builds = dict[str, Callable[[], Checkpoint]]()
    models = [model for model in releases.MODELS if model not in _LEFT_OUT]
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
    tensors = dict(checkpoint.tensors)
    del tensors[cell.tensor]
    if cell.spec is not None:
        tensors[cell.tensor] = cell.spec
    source = as_source(replace(checkpoint, tensors=tensors), folder)
    for error in errors_of(examine(source, vllm=VERSION).data.findings):
        return f"{error.rule} {error.where}: {error.says}"
    return ""


@dataclass(frozen=True)
class DryLoads:
    """One form in vLLM; `dry` starts its process where it is not there."""

    dry: Callable[[], DryLoader]
    job: Job
    base: Checked
    runtime: RuntimeView

    def says(self, cells: Sequence[Cell]) -> dict[str, str]:
        """What vLLM does with each cell, by its key; "" where it loads all of it."""
        said = dict[str, str]()
        waiting = self._apart(cells)
        while waiting:
            again = list[list[Cell]]()
            for group, account in zip(waiting, self._loaded(waiting), strict=True):
                known = self._known(group, account)
                said |= known
                left = [cell for cell in group if cell.key not in known]
                middle = -(-len(left) // 2)
                if known:
                    middle = len(left)
                again += [part for part in (left[:middle], left[middle:]) if part]
            waiting = again
        return said

    def alone(self, cells: Sequence[Cell]) -> dict[str, str]:
        """What vLLM does with each of them where nothing else is broken."""
        said = dict[str, str]()
        for cell, account in zip(cells, self._loaded([[cell] for cell in cells]), strict=True):
            (words,) = self._known([cell], account).values()
            said[f"{cell.key} alone"] = words
        return said

    def _known(self, group: Sequence[Cell], account: LoadAccount) -> dict[str, str]:
        """Of a load with several broken tensors what is sure."""
        said = dict[str, str]()
        for cell in group:
            if cell.tensor in account.load.cures:
                said[cell.key] = "raises"
        quiet = [cell for cell in group if cell.key not in said]
        failure = account.load.failure
        if failure is not None:
            for cell in quiet:
                if cell.tensor == failure.tensor or len(quiet) == 1:
                    said[cell.key] = f"{failure.stage}: {failure.words}"
            return said
        errors = errors_of(found for found, *_ in objections(account.with_cures(()), self.base))
        words = dict.fromkeys([cell.key for cell in quiet], "")
        for error in errors:
            owner = self._owner(error.where, group)
            if owner is None:
                return said
            words[owner.key] = f"{error.where}: {error.says}"
        return words | said

    def _owner(self, where: str, group: Sequence[Cell]) -> Cell | None:
        """The broken tensor that a finding is about; None where it could be one of several."""
        by_name = [cell for cell in group if cell.tensor == where]
        of_module = [cell for cell in group if self._module(cell.tensor) == self._module(where)]
        for same in (by_name, of_module, group):
            if len(same) == 1:
                return same[0]
        return None

    def _module(self, name: str) -> str:
        """The module in vLLM that a tensor goes to, for a router or a parameter the one around it:
        a finding names another tensor of the module where its own is missing.
        """
        place = self.runtime.view.place(HFName(name))
        if place is None:
            return name
        if place.role in ("router", "state") or not place.leaf:
            return place.runtime.rpartition(".")[0]
        return place.runtime

    def _apart(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        """Groups in which no module has two broken tensors."""
        met = Counter[str]()
        groups: dict[int, list[Cell]] = defaultdict(list)
        for cell in cells:
            module = self._module(cell.tensor)
            groups[met[module]].append(cell)
            met[module] += 1
        return [*groups.values()]

    def _loaded(self, groups: Sequence[Sequence[Cell]]) -> list[LoadAccount]:
        with tempfile.TemporaryDirectory() as scratch:
            asked = Path(scratch, "states.json")
            states = [{cell.tensor: cell.spec for cell in group} for group in groups]
            asked.write_text(json.dumps(states))
            self.dry().load_all([replace(self.job, cures=str(asked))])
            accounts = list[LoadAccount]()
            for number in range(len(groups)):
                path = Path(scratch, f"{number}.json")
                accounts.append(LoadAccount.model_validate_json(path.read_bytes()))
            return accounts


def judged(
    name: str,
    checkpoint: Checkpoint,
    folder: Path,
    dry: Callable[[], DryLoader] | None,
    step: int = 1,
) -> Iterator[tuple[Cell, str, str]]:
    """Each cell of a form, what the static check says of it, and what the dry load says.

    Args:
        dry: starts vLLM; None to judge only what is kept.
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
    job = Job(folder=folder, method=base.method)
    if dry and "" not in said:
        whole = errors_of(with_loads(base, dry().load_all([job])).data.findings)
        said[""] = "".join(error.says for error in whole[:1])
    loads = dry and DryLoads(dry, job, base, base.runtime)
    if said.get(""):
        print(f"{name}: vLLM refuses it as it is: {said[''][:150]}")
        wanted = []
    if loads:
        said |= loads.says([cell for cell in wanted if cell.key not in said])
    static = dict[str, str]()
    for cell in wanted:
        static[cell.key] = static_says(checkpoint, folder, cell)
    # Where they part, a finding may have been about another tensor of that load.
    parted = [cell for cell in wanted if bool(static[cell.key]) != bool(said.get(cell.key))]
    parted = [cell for cell in parted if f"{cell.key} alone" not in said]
    if loads and parted:
        said |= loads.alone(parted)
    if loads:
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(said))
    for cell in wanted:
        if cell.key in said:
            yield cell, static[cell.key], said.get(f"{cell.key} alone", said[cell.key])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="forms with these words in their name")
    parser.add_argument("--list", action="store_true", help="every cell on which they part")
    parser.add_argument("--kept", action="store_true", help="what is kept alone: start no vLLM")
    options = parser.parse_args()
    loader._CURES = Path(__file__).with_name("cells_in_vllm")
    counts = Counter[tuple[str, str]]()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        @cache
        def dry() -> DryLoader:
            (vllm,), _ = had_vllms([VERSION], find_vllm())
            return stack.enter_context(DryLoader(vllm, gpu=GPU))

        for number, (name, checkpoint) in enumerate(forms()):
            if options.only not in name:
                continue
            start = None if options.kept else dry
            for cell, static, loaded in judged(name, checkpoint, scratch / f"{number}", start):
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
                counts[cell.broken, how] += 1
            sys.stdout.flush()
    print("break", *HOWS, sep="\t")
    for broken in dict.fromkeys(broken for broken, _ in counts):
        print(broken, *[counts[broken, how] for how in HOWS], sep="\t")
    print(
        "all",
        *[sum(count for key, count in counts.items() if how in key) for how in HOWS],
        sep="\t",
    )


if __name__ == "__main__":
    main()
