"""The kinds of fuzz cases that write a new checkpoint: links and names of a stranger for fix, graft,
convert.

In: a random generator. Out: a `Case`, as in kinds.py, which lists these too; and what `kept_values`
finds in the new
folder: no exit status of 0 with other values than the file's.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import edits
from case import Case, some
from data_files import json_of
from edits import ODD, Edit

OTHER = {"compressed-tensors": "modelopt", "modelopt": "compressed-tensors"}
INDEX = "model.safetensors.index.json"
BASES = {f"one model, first in {dialect}": dialect for dialect in OTHER}
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
Kind = Callable[[Random], Case]


def written(rng: Random, kinds: tuple[Kind, ...]) -> Case:
    """A case of other kinds, for the cures instead."""
    words = (*rng.choice(ODD["cures"]).split(), "--out", "{}.out", "--static-only")
    return replace(rng.choice(kinds)(rng), words=words, reads_weights=False, also=kept_values)


def _case(rng: Random, make: Callable[[Random, str], Edit]) -> Case:
    """A base, edits of a folder in it, and a verb that makes a new checkpoint of it."""
    base, dialect = rng.choice(list(BASES.items()))
    where, line = rng.choice(
        (
            ("first", f"convert {{}}/first --to {OTHER[dialect]}"),
            ("there", f"convert {{}}/there --to {dialect}"),
            ("broken", "fix {}/broken"),
            ("lost", "graft {}/lost --from {}/release"),
            ("release", "graft {}/lost --from {}/release"),
            ("release", "quantize {}/release --scheme w4a16-fp8"),
        )
    )
    end = rng.choice(("--dry-run", "--dry-run --json", *["--out {}.out --static-only"] * 6))
    words = tuple(f"{line} {end}".split())
    made = some(rng, lambda: make(rng, where))
    return Case(base=base, edits=made, words=words, reads_weights=False, also=kept_values)


def links_for_cures(rng: Random) -> Case:
    """A file of the checkpoint, or of its release, is a link; mostly one that leads out."""
    return _case(rng, _link)


def names_for_cures(rng: Random) -> Case:
    """Files, shards and tensors with odd names."""
    return _case(rng, rng.choice((_odd_file, _odd_shard, _odd_tensor)))


def _link(rng: Random, where: str) -> Edit:
    name = _mostly(rng, ODD["links"], 3)
    target = _mostly(rng, ODD["targets"], 6)

    def do(folder: Path) -> None:
        path = folder / where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        beside = folder.parent / "beside"
        if target == "hop":
            (path.parent / "hop").symlink_to(beside / "secret")
        path.symlink_to(target.format(beside=beside))

    return Edit(f"{where}/{name}: is a link to {target}", do)


def _mostly(rng: Random, words: list[str], number: int) -> str:
    """A word; the first ones come oftener."""
    return rng.choice((*words, *words[:number] * 3))


def _odd_name(rng: Random) -> str:
    name = rng.choice((*edits.NAMES, *ODD["files"]))[:200]
    return (
        name.replace("/", "\u2215").replace("\x00", "0").replace("\ud800", "\udc80").strip(".")
        or "..."
    )


def _odd_file(rng: Random, where: str) -> Edit:
    name = _odd_name(rng) + rng.choice(ODD["file_ends"])

    def do(folder: Path) -> None:
        path = folder / where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")

    return Edit(f"{where}: a file called {edits.shown(name)}", do)


def _at(names: list[str], place: float) -> str:
    return names[int(place * len(names))]


def _odd_shard(rng: Random, where: str) -> Edit:
    """One shard, and its lines in the index, have another name."""
    name = rng.choice((_odd_name(rng), "../x", "sub/x", "model", "mtp_copies"))
    place = rng.random()

    def do(folder: Path) -> None:
        path = folder / where / INDEX
        tree = json_of(path)
        old = _at(sorted(set(tree["weight_map"].values())), place)
        new = f"{name}.safetensors"
        for tensor, file in tree["weight_map"].items():
            if file == old:
                tree["weight_map"][tensor] = new
        edits.replace(path, json.dumps(tree).encode())
        (folder / where / new).parent.mkdir(exist_ok=True)
        (folder / where / old).rename(folder / where / new)

    return Edit(f"{where}: a shard called {edits.shown(name)}", do)


def _odd_tensor(rng: Random, where: str) -> Edit:
    """A tensor has another name, in its shard and in the index; its bytes stay."""
    new = rng.choice((*edits.NAMES, "model.layers.0.self_attn.q_proj.k_scale", "lm_head.bias"))
    place = rng.random()

    def do(folder: Path) -> None:
        path = folder / where / INDEX
        tree = json_of(path)
        old = _at(sorted(tree["weight_map"]), place)
        file = tree["weight_map"].pop(old)
        tree["weight_map"][new] = file
        header, start = edits.read_header(folder / where / file)
        header[new] = header.pop(old)
        raw = json.dumps(header).encode()
        data = (folder / where / file).read_bytes()[start:]
        edits.replace(folder / where / file, struct.pack("<Q", len(raw)) + raw + data)
        edits.replace(path, json.dumps(tree).encode())

    return Edit(f"{where}: a tensor called {edits.shown(new)}", do)


# --- what a new folder holds ----------------------------------------------------------------------


def read(folder: Path) -> Tensors:
    """Every tensor of the shards of a folder."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, start = edits.read_header(path)
        raw = path.read_bytes()[start:]
        header.pop("__metadata__", None)
        for name, entry in header.items():
            data = raw[slice(*entry["data_offsets"])]
            found[name] = (entry["dtype"], tuple(entry["shape"]), data)
    return found


def kept_values(case: Case, folder: Path, status: int) -> list[str]:
    """Tensors of a new checkpoint with other values than in the one that it was made of, where the
    command says yes.
    """
    out = Path(f"{folder}.out")
    if status or case.words[0] == "quantize" or not out.is_dir():
        return []
    made = read(out)
    had = read(folder / case.words[1].removeprefix("{}").strip("/"))
    both = sorted(name for name in made.keys() & had.keys() if made[name][:2] == had[name][:2])
    return [f"other values in {name!a}" for name in both if made[name] != had[name]][:3]
