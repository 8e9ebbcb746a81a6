"""Good checkpoints, and those broken on purpose, each by one change that somebody made in the field.

In: broken.yaml. Out: GOOD, name -> a function that builds a `Checkpoint`; BROKEN, a table of `Case`;
and WITHOUT_MTP, those of models that never had an MTP block.

A checkpoint is a list: who writes it, its model, the schemes of the backbone and of the MTP block,
further words by name; or, with changes that are made in order, a mapping:

    of                a name of GOOD, or such a list
    lose, elsewhere   the tensors of these names (an expression) are gone; are in a file that the
                      index does not list
    rename, retype    by an expression: another name; another dtype
    reshape           by an expression: another shape, `n 1 -> n`
    pack              by an expression for modules: stored in a scheme although nothing says so
    tensors           name -> dtype and shape
    without, ignore   entries of the list of exceptions: those that an expression finds go, these
                      are added
    config            value by its place in config.json, levels apart by /, * for each; null: gone
    hf_quant_config   the same in that file; in_file: it has the whole quantization config
    index, cut        tensor -> file in the index; the second file is cut short
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import foreign_form
import good
import modelopt_form
import real_releases
import releases
import without_mtp
from checkpoint_files import Checkpoint, ignoring, pack, truncate
from keepmtp.validate.facts.findings import Finding
from tables import table

TABLE = table("helpers/broken")
WRITERS = {}
for module in (real_releases, without_mtp, foreign_form, modelopt_form, good):
    WRITERS |= vars(module)


def put(tree: Any, place: str, value: Any) -> None:
    """Change what is at a place of a JSON tree."""
    key, _, rest = place.partition("/")
    for each in list(tree) if key == "*" else [key]:
        if rest:
            put(tree[each], rest, value)
        elif value is None:
            del tree[each]
        else:
            tree[each] = deepcopy(value)


def _reshape(checkpoint: Checkpoint, names: str, rule: str) -> None:
    old, new = (side.split() for side in rule.split("->"))

    def shape(*sizes: int) -> tuple[int, ...]:
        letters = dict(zip(old, sizes, strict=True))
        return tuple(letters.get(each) or int(each) for each in new)

    checkpoint.retype(names, shape=shape)


def _each(change: Callable[..., object]) -> Callable[[Checkpoint, Mapping[str, Any]], object]:
    return lambda checkpoint, given: [change(checkpoint, *each) for each in given.items()]


CHANGES = {
    "lose": Checkpoint.take,
    "elsewhere": lambda c, names: setattr(c, "elsewhere", c.take(names)),
    "rename": _each(Checkpoint.rename),
    "retype": _each(Checkpoint.retype),
    "reshape": _each(_reshape),
    "pack": _each(lambda c, modules, scheme: pack(modules, scheme)(c)),
    "tensors": _each(lambda c, name, spec: c.tensors.update({name: (spec[0], tuple(spec[1]))})),
    "without": lambda c, names: ignoring(without=names)(c),
    "ignore": lambda c, names: ignoring(*names)(c),
    "config": _each(lambda c, *given: put(c.config, *given)),
    "hf_quant_config": _each(
        lambda c, *given: put(c.json_files.setdefault("hf_quant_config.json", {}), *given)
    ),
    "in_file": lambda c, _: modelopt_form.in_hf_quant_config(c),
    "index": lambda c, files: setattr(c, "index", lambda tree: tree["weight_map"].update(files)),
    "cut": lambda c, _: setattr(c, "after", truncate),
}


def built(row: Any) -> Checkpoint:
    """A checkpoint by its row."""
    if isinstance(row, str):
        return GOOD[row]()
    if isinstance(row, list):
        named = row[-1] if isinstance(row[-1], dict) else {}
        writer, *words = row[: len(row) - bool(named)]
        return WRITERS[writer](*words, **deepcopy(named))
    checkpoint = built(row["of"])
    for key, given in row.items():
        if key in CHANGES:
            CHANGES[key](checkpoint, given)
    return checkpoint


def agree(row: Mapping[str, Any], findings: Iterable[Finding]) -> None:
    """Each finding that a row expects, by parts of its fields, and no others.

    `about` names the rules that are looked at; with `among` there are others too.
    """
    found = [each for each in findings if each.rule in row.get("about", [each.rule])]
    for wanted in row["found"]:
        assert any(
            all(str(part) in str(getattr(each, key)) for key, part in wanted.items())
            for each in found
        ), (wanted, found)
    assert "among" in row or len(found) == len(row["found"]), found


GOOD = {f"released {model}": partial(good.released, model) for model in releases.MODELS} | {
    name: partial(built, row) for name, row in TABLE["good"].items()
}


@dataclass(frozen=True)
class Case:
    name: str
    row: dict[str, Any]
    rule: str
    where: str
    says: str = ""

    @property
    def base(self) -> str:
        return str(self.row["of"])

    @property
    def severity(self) -> str:
        return self.row.get("severity", "error")

    def build(self) -> Checkpoint:
        return built(self.row)


BROKEN, WITHOUT_MTP = (
    tuple(Case(name, row, *row["found"]) for name, row in TABLE[part].items())
    for part in ("broken", "without_mtp")
)
