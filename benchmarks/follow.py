"""What another version of vLLM changes for keepmtp.

    .venv/bin/python benchmarks/follow.py 0.34.0 [--since 0.33.0]

In: a version, and one that is known; the Python of both is fetched once. Out: on the terminal what
no longer holds, and docs/tables/versions.md, which family loads in which version:

- files of vLLM that this tree cites, and that differ, each with the place that cites it;
- what vLLM answers otherwise when it is asked (`ask_vllm.py`);
- cures of vLLM's own defects (validate/keepmtp_cures) that end with it, or whose source has another
  hash: such a cure does nothing;
- every family in every variant: what loads now, and what no longer does.

Easy to get wrong: a cited file that differs is a place to read again, not a fault. And a version's
answers are kept in build/follow until keepmtp's dry load changes, because they take minutes.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path

from _helpers import ROOT
from ask_vllm import ask, write_down
from keepmtp.recipes.families import find_family
from keepmtp.recipes.runtimes.vllm import NEWEST, holds, parsed
from keepmtp.validate import keepmtp_cures
from keepmtp.validate.dryload import loader
from keepmtp.validate.dryload.failures import known
from keepmtp.validate.dryload.versions import had_vllms
from keepmtp.validate.facts.vllm_env import VLLM, find_vllm
from keepmtp.validate.keepmtp_cures import source_hash
from matrix import CURED, LOADS, VARIANTS, run
from pages import numbered, table, with_part
from releases import MODELS

GPU = "sm90"
KEPT = ROOT / "build" / "follow"
PAGE = ROOT / "docs" / "tables" / "versions.md"
CITING = ("*.py", "*.yaml", "*.toml")
_CITED = re.compile(r"(?<![\w./])(?:vllm/)?([\w/]*)(?:\{([\w, ]+)\})?([\w/]*)\.py\b")
_OF_ONE = re.compile(r"(?<=vLLM) \d[\d.]*\d|(?<=\.py):\d+|\. Judged: .*|'/[^']*'")


def site_of(vllm: VLLM) -> Path:
    """The folder with vllm/ in it."""
    if vllm.site:
        return vllm.site
    (found,) = vllm.python.parent.parent.glob("lib/python*/site-packages/vllm")
    return found.parent


def citations(files: Collection[str]) -> dict[str, list[str]]:
    """Files of vLLM, and where this tree cites them: `config/speculative.py`, `glm4_moe_mtp.py`,
    `quark/{quark,utils}.py`. First folders may be missing, as long as one file alone ends so, or one
    in the folder that was cited last.
    """
    words = ["git", "ls-files", *CITING]
    tracked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    names = tracked.stdout.split()
    own = {name.rpartition("/")[2] for name in names}
    by_name, found = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for file in files:
        by_name[file.rpartition("/")[2]].append(file)
    for name in names:
        # The files that SGLang's folder cites are SGLang's.
        if name.startswith(("tests/", "benchmarks/", "checkpoints/sglang/")):
            continue
        folder = ""
        for number, line in enumerate((ROOT / name).read_text().splitlines(), start=1):
            for before, group, after in _CITED.findall(line):
                for word in group.split(","):
                    cited = f"{before}{word.strip()}{after}.py"
                    last = cited.rpartition("/")[2]
                    meant = [file for file in by_name[last] if f"/{file}".endswith(f"/{cited}")]
                    if len(meant) > 1:
                        meant = [file for file in meant if file == f"{folder}/{cited}"]
                    if len(meant) == 1 and (cited != last or last not in own):
                        found[meant[0]].append(f"{name}:{number}")
                        folder = meant[0].rpartition("/")[0]
    return found


def changed_files(old: Path, new: Path) -> Iterator[tuple[str, str]]:
    """Cited files that differ, and where they are cited."""
    files = {str(path.relative_to(old / "vllm")): path for path in (old / "vllm").rglob("*.py")}
    for file, places in sorted(citations(files).items()):
        other = new / "vllm" / file
        if not other.is_file():
            yield f"{file} is gone", ", ".join(places)
        elif other.read_bytes() != files[file].read_bytes():
            yield file, ", ".join(places)


def asked_otherwise(old: Path, new: Path) -> Iterator[tuple[str, str]]:
    """What vLLM says otherwise when it is asked."""
    before, after = ask(old), ask(new)
    for key in before:
        if before[key] == after[key]:
            continue
        if isinstance(before[key], list):
            added = sorted({*after[key]} - {*before[key]})
            gone = sorted({*before[key]} - {*after[key]})
            yield key, f"new: {', '.join(added) or 'none'}; gone: {', '.join(gone) or 'none'}"
        else:
            yield key, f"{before[key]} -> {after[key]}"


def cures_that_end(site: Path, version: str) -> Iterator[tuple[str, str]]:
    """Cures that do nothing in a version: it has no such defect, or their source is another."""
    cures = keepmtp_cures.cures()
    for defect in known().defects:
        name = defect.cure_in_vllm
        if not name:
            continue
        if not holds(defect.versions, version):
            yield name, f"the defect is not in {version}: {defect.versions}"
            continue
        cure = cures[name]
        own = source_hash(site / f"{cure.module.replace('.', '/')}.py", cure.names)
        if not own:
            yield name, f"gone: {', '.join(cure.names)} of {cure.module}"
        elif own not in cure.hashes:
            yield name, f"{cure.module} has {own}: read it, then add the hash or end `versions`"


def cells_of(vllm: VLLM) -> dict[str, str]:
    """`model, variant` -> "loads", or why not."""
    cells = run(product(MODELS, VARIANTS), (GPU,), (1,), vllm)
    return {
        f"{model}, {variant}": of_version(text, vllm)
        for (model, variant, *_), text in cells.items()
    }


def of_version(text: str, vllm: VLLM) -> str:
    """A cell, without what differs between versions that have one fault; what a version says over
    packages that it is not made for is unknown.
    """
    text = _OF_ONE.sub("", text)
    if vllm.unmet and not text.startswith((LOADS, "a defect of vLLM", "not made")):
        return f"unknown, since it requires {vllm.unmet}: {text}"
    return text


def kept(vllm: VLLM) -> dict[str, str]:
    """A version's cells, from build/follow where they are there."""
    place = KEPT / f"{vllm.version}.{dry_load_hash()}.json"
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(json.dumps(cells_of(vllm), indent=1))
    return json.loads(place.read_text())


def dry_load_hash() -> str:
    own = hashlib.sha256()
    dry_load, cures = Path(loader.__file__).parent, Path(keepmtp_cures.__file__).parent
    for path in [*sorted(dry_load.rglob("*.py")), *sorted(cures.glob("*.py"))]:
        own.update(path.read_bytes())
    return own.hexdigest()[:12]


def versions_page(cells: Mapping[str, Mapping[str, str]]) -> str:
    """What docs/tables/versions.md has after its words, of the versions whose answers are kept."""
    numbers, lines = dict[str, int](), list[list[str]]()
    by_family = defaultdict[str, list[str]](list)
    for model, config in MODELS.items():
        by_family[find_family(config, model).model_type].append(model)
    for family, models in sorted(by_family.items()):
        row = [family]
        for told in cells.values():
            own = [text for name, text in told.items() if name.split(", ")[0] in models]
            kinds = Counter(text.partition(":")[0] for text in own)
            row.append(f"{kinds[LOADS]} of {len(own)}")
            if kinds[CURED]:
                row[-1] += f", {kinds[LOADS] + kinds[CURED]} with cures"
            for reason in dict.fromkeys(text.removeprefix(f"{CURED}: ") for text in own):
                if reason != LOADS:
                    row[-1] += f" [{numbers.setdefault(reason, len(numbers) + 1)}]"
        lines.append(row)
    return f"{table(['family', *cells], lines)}\n\n{numbered(numbers)}"


def show(title: str, rows: Iterable[tuple[str, str]]) -> None:
    print(f"\n{title}:")
    for name, text in rows:
        print(f"  {name}\n    {text}")


def otherwise(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The cells of which the second version says something else."""
    for name, text in after.items():
        if before.get(name) != text:
            yield name, f"{before.get(name)} -> {text}"


def main() -> None:
    """Print what differs, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vllm")
    parser.add_argument("--since", default=NEWEST)
    parser.add_argument("--write", action="store_true", help="the answers, into vllm.json, too")
    options = parser.parse_args()
    doing = partial(print, file=sys.stderr)
    found = had_vllms([options.since, options.vllm], find_vllm(), progress=doing)[0]
    old, new = sorted(found, key=lambda vllm: parsed(vllm.version))
    sites = site_of(old), site_of(new)
    print(f"vLLM {old.version} -> {new.version}")
    show("cited files that differ", changed_files(*sites))
    show("answers that differ", asked_otherwise(*sites))
    show("cures that end or do nothing", cures_that_end(sites[1], new.version))
    show("families that load otherwise", otherwise(kept(old), kept(new)))
    every = {}
    for place in KEPT.glob(f"*.{dry_load_hash()}.json"):
        every[place.name.rpartition(".json")[0].rpartition(".")[0]] = json.loads(place.read_text())
    cells = dict(sorted(every.items(), key=lambda item: parsed(item[0])))
    PAGE.write_text(with_part(PAGE, versions_page(cells)))
    if options.write:
        write_down(new.version, sites[1])


if __name__ == "__main__":
    main()
