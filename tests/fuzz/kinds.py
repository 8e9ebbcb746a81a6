"""The kinds of fuzz cases: which files are changed, and which verbs then read them.

In: a random generator. Out: a `Case`: a folder to start from, edits, and a command line. KINDS is
the list that the campaign counts by.

Easy to get wrong: a case is made from its generator alone, so that seed and number repeat it. It
must not ask what other cases did.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from random import Random
from typing import Any

import corpus
import cures
import edits
import planted
import sealed
import verbs
import wheels
import yaml
from case import Case, some
from data_files import json_of, spelled, table
from edits import ODD, Edit

INDEX = "model.safetensors.index.json"


def make(seed: int, number: int) -> Case:
    """The case of this number."""
    rng = Random(f"{seed} {number}")
    kind = kind_of(number)
    return replace(KINDS[kind](rng), kind=kind)


def kind_of(number: int) -> str:
    """Kinds take turns."""
    return list(KINDS)[number % len(KINDS)]


def checkpoint_words(rng: Random, base: str) -> tuple[str, ...]:
    """A verb that reads a checkpoint."""
    model = corpus.model_of(base)
    ways = list(ODD["on_checkpoint"])
    if model:
        ways += ODD["on_model"]
    if base in corpus.REAL:
        ways.append("quantize MODEL --source {} --out {}.out")
    return tuple(rng.choice(ways).replace("MODEL", model).split())


def _on_checkpoint(edit: "OnFolder", pick: Callable[[Random], str]) -> Callable[[Random], Case]:
    """A kind: some such edits of a checkpoint, and a verb that reads it."""

    @wraps(edit)
    def kind(rng: Random) -> Case:
        base = pick(rng)
        folder = corpus.folder(base)
        made = some(rng, lambda: edit(rng, folder))
        return Case(base=base, edits=made, words=checkpoint_words(rng, base))

    return kind


OnFolder = Callable[[Random, Path], Edit]
of_any = partial(_on_checkpoint, pick=corpus.pick)
of_quantized = partial(_on_checkpoint, pick=partial(corpus.pick, quantized=True))
of_modelopt = partial(_on_checkpoint, pick=lambda rng: corpus.MODELOPT_FILE)


# --- weights --------------------------------------------------------------------------------------


@of_any
def header_bytes(rng: Random, folder: Path) -> Edit:
    """Headers whose bytes are wrong: flipped, cut, in another encoding, with another length."""
    file = _shard(rng, folder)
    way = rng.random()
    _, start = edits.read_header(folder / file)
    if way < 0.35:
        return _inside_header(file, edits.mangled(rng, file, start - 8))
    if way < 0.5:
        return edits.mangled(rng, file, start)
    length = rng.choice(ODD["lengths"])

    def relength(folder: Path) -> None:
        tree, _ = edits.read_header(folder / file)
        edits.write_shard(folder / file, json.dumps(tree).encode(), length=length)

    return Edit(f"{file}: length field {length}", relength)


@of_any
def header_tree(rng: Random, folder: Path) -> Edit:
    """Headers that are JSON and wrong: types, dtypes, shapes, offsets, names, metadata,
    duplicates.
    """
    file = _shard(rng, folder)
    tree, _ = edits.read_header(folder / file)
    names = [name for name in tree if name != "__metadata__"] or [""]
    one = rng.choice(names)
    many = rng.choice((1000, 200_000))
    if rng.random() < 0.5:
        return edits.grafted(rng, file, {one: tree.get(one)}, header=True)
    if rng.random() < 0.1:
        return Edit(f"{file}: header has a key twice", lambda folder: _twice(folder / file))
    key = rng.choice(list(ODD["header"]))
    more = {"dtype": "x" * 10_000, "shape": [1] * 2000}
    new = rng.choice([*ODD["header"][key], more.get(key)])
    metadata = rng.choice(ODD["metadata"])
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    ways = (
        ("offsets one byte later", lambda tree: _shift(tree[one], 1, 1)),
        ("offsets one byte longer", lambda tree: _shift(tree[one], 0, 1)),
        ("half the shape", lambda tree: tree[one].update(shape=tree[one]["shape"][1:])),
        ("no tensors", lambda tree: {}),
        (f"{many} empty tensors", lambda tree: tree.update({f"e.{n}": empty for n in range(many)})),
    )
    of_tree = edits.on_tree(file, *rng.choice(ways), header=True)
    values = (
        edits.put(file, (one, key), new, header=True),
        edits.put(file, ("__metadata__",), metadata, header=True),
        # One tensor's offsets for two.
        edits.put(file, (f"{one}.twin",), tree.get(one), header=True),
    )
    return rng.choice((*values, *[of_tree] * len(ways)))


def _shift(entry: Any, start: int, end: int) -> None:
    entry["data_offsets"] = [entry["data_offsets"][0] + start, entry["data_offsets"][1] + end]


def _twice(path: Path) -> None:
    raw = json.dumps(edits.read_header(path)[0]).encode()
    edits.write_shard(path, b"{" + raw[1 : raw.index(b"}") + 1] + b"," + raw[1:])


def _inside_header(file: str, inner: Edit) -> Edit:
    """An edit of bytes, applied to the JSON of a header whose length field stays right."""

    def do(folder: Path) -> None:
        path = folder / file
        tree, _ = edits.read_header(path)
        shard = path.rename(folder / "shard")
        path.write_bytes(json.dumps(tree).encode())
        inner.do(folder)
        changed = path.read_bytes()
        edits.write_shard(shard.rename(path), changed)

    return Edit(f"{inner.says} (in the header)", do)


def _shard(rng: Random, folder: Path) -> str:
    return rng.choice(sorted(path.name for path in folder.glob("*.safetensors")))


# --- JSON files of a checkpoint -------------------------------------------------------------------


@of_any
def index(rng: Random, folder: Path) -> Edit:
    """The index: wrong types, files outside the folder, missing ones, wrong bytes."""
    path = rng.choice((*ODD["shards"], "x" * 5000))
    name = rng.choice(edits.NAMES)
    if rng.random() < 0.4:
        return edits.put(INDEX, ("weight_map", name), path)
    return edits.spoilt(rng, folder, INDEX)


@of_any
def config(rng: Random, folder: Path) -> Edit:
    """Every key of config.json: null, other types, numbers out of range, deep trees."""
    return edits.spoilt(rng, folder, "config.json")


@of_quantized
def quantization(rng: Random, folder: Path) -> Edit:
    """quantization_config of every dialect."""
    return edits.spoilt(rng, folder, "config.json", under=("quantization_config",))


@of_modelopt
def modelopt_file(rng: Random, folder: Path) -> Edit:
    """hf_quant_config.json."""
    return edits.spoilt(rng, folder, "hf_quant_config.json")


@of_any
def counts(rng: Random, folder: Path) -> Edit:
    """The numbers of config.json that something is counted by."""
    tree = json_of(folder / "config.json")
    numbers = [place for place in edits.places(tree) if isinstance(edits.at(tree, place), int)]
    return edits.put("config.json", rng.choice(numbers), rng.choice(ODD["numbers"]))


@of_quantized
def regexes(rng: Random, folder: Path) -> Edit:
    """Patterns of a stranger, in every list of names."""
    tree = json_of(folder / "config.json").get("quantization_config", {})
    lists = [place for place in edits.places(tree) if isinstance(edits.at(tree, place), list)]
    pattern = rng.choice(edits.REGEXES)
    *above, last = rng.choice([*lists, ("ignore",)])
    if rng.random() >= 0.8:
        pattern = pattern.removeprefix("re:")

    def do(tree: Any) -> None:
        holder = edits.at(tree, ("quantization_config", *above))
        old = None
        if isinstance(holder, list) or last in holder:
            old = holder[last]
        holder[last] = [*(old or []), pattern]

    return edits.on_tree("config.json", f"{last} has {edits.shown(pattern)}", do)


@of_any
def files(rng: Random, folder: Path) -> Edit:
    """A file of the checkpoint is a FIFO, a folder, a link that ends nowhere, a device."""
    names = {path.name for path in folder.iterdir()}
    names |= {"hf_quant_config.json", "README.md", "tokenizer.json"}
    return edits.no_file(rng, rng.choice(sorted(names)))


# --- recipes --------------------------------------------------------------------------------------


def recipe_tree(rng: Random) -> Case:
    """A recipe whose values are of other types."""
    base = rng.choice(corpus.RECIPES)
    tree = yaml.safe_load((corpus.folder(base) / RECIPE).read_text())
    made = some(rng, lambda: _as_yaml(edits.grafted(rng, RECIPE, tree), RECIPE))
    return Case(base=base, edits=made, words=tuple(rng.choice(ODD["on_recipe"]).split()))


def recipe_text(rng: Random) -> Case:
    """A recipe that is odd YAML: aliases of aliases, deep, huge, tagged, with a key twice."""
    base = rng.choice(corpus.RECIPES)
    text = spelled(rng.choice(list(table("recipes/test_yaml_file")["REFUSED"].values()))[0])
    says = edits.shown(text)
    ways = (
        edits.mangled(rng, RECIPE, (corpus.folder(base) / RECIPE).stat().st_size),
        edits.on_bytes(RECIPE, f"{says}, at the end", lambda raw: raw + b"\n" + text.encode()),
        edits.on_bytes(RECIPE, f"{says}, alone", lambda raw: text.encode()),
    )
    return Case(
        base=base, edits=(rng.choice(ways),), words=tuple(rng.choice(ODD["on_recipe"]).split())
    )


def _as_yaml(edit: Edit, file: str) -> Edit:
    """An edit of a JSON tree, for a file that is YAML before and after."""

    def do(folder: Path) -> None:
        tree = yaml.safe_load(edits.regular(folder / file).read_text())
        edits.replace(folder / file, json.dumps(tree).encode())
        edit.do(folder)

    return Edit(edit.says, do)


RECIPE = "recipe.yaml"


# --- the command line -----------------------------------------------------------------------------


def command_line(rng: Random) -> Case:
    """Words that name nothing: folders that are missing, odd names of repositories, of models, of
    numbers.
    """
    base = rng.choice(corpus.REAL)
    # No shell can type the others.
    names = [name for name in edits.NAMES if "\x00" not in name and "\ud800" not in name]
    odd = {"ODD": rng.choice([*ODD["missing"], *names]), "MODEL": base}
    line = rng.choice(ODD["with_odd_words"]).split()
    words = tuple(odd.get(word, word) for word in line)
    return Case(base=base, edits=(), words=words, reads_weights=False)


def broken_for_cures(rng: Random) -> Case:
    """A checkpoint that verbs read, for those that write another one."""
    return cures.written(rng, (header_tree, index, config, counts, quantization, regexes, files))


_KINDS = (
    header_bytes,
    header_tree,
    index,
    config,
    counts,
    quantization,
    regexes,
    modelopt_file,
    files,
    recipe_tree,
    recipe_text,
    command_line,
    verbs.prompt_files,
    verbs.texts,
    verbs.rows,
    verbs.names,
    verbs.companions,
    verbs.results,
    verbs.init,
    verbs.answers,
    broken_for_cures,
    cures.links_for_cures,
    cures.names_for_cures,
    planted.planted,
    planted.changing,
    wheels.wheels,
    sealed.sealed,
)
KINDS = {kind.__name__.replace("_", " "): kind for kind in _KINDS}
