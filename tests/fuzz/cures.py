"""The kinds of fuzz cases that write a new checkpoint: records, links and names of a stranger for
fix, graft, convert.

In: a random generator. Out: a `Case`, as in kinds.py, which lists these too; and what `kept_values`
finds in the new
folder: no exit status of 0 with other values than the file's.

Easy to get wrong: a scale that is re-expressed may come back as its neighbour. One step of F32 is
no fault.
"""

import hashlib
import json
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import edits
from case import Case, some
from edits import Edit

OTHER = {"compressed-tensors": "modelopt", "modelopt": "compressed-tensors"}
RECORD, CONFIG, INDEX = "keepmtp-convert.json", "config.json", "model.safetensors.index.json"
BASES = {f"one model, first in {dialect}": dialect for dialect in OTHER}
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
Kind = Callable[[random.Random, str], Case]
TARGETS = (
    "{beside}/secret",
    "{beside}/secret.json",
    "{beside}",
    "../../beside/secret",
    "../../../beside/secret",
)
TARGETS += (
    "../beside/secret",
    "../../beside",
    "../lost/config.json",
    "../release/config.json",
    "nothing",
    "/dev/zero",
)
TARGETS += (".", "config.json", "hop")
LINKS = (
    "original/consolidated.safetensors",
    "a/b/c.safetensors",
    "a/b/notes.bin",
    "a/.hidden/x",
    "extra.safetensors",
    "consolidated.00.pth",
    "audio_tokenizer",
    "audio_tokenizer/model.safetensors",
    "audio_tokenizer/config.json",
    "additional_chat_templates/x.jinja",
    "encoding/x.py",
    "modeling_x.py",
    "tokenizer.json",
    "tokenizer.model",
    "LICENSE",
    "README.md",
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "keepmtp.json",
    "recipe.yaml",
    "config.json.partial",
    ".keepmtp",
    RECORD,
    CONFIG,
    INDEX,
)
FILES = (
    "../victim",
    "../../beside/secret",
    "{beside}/secret",
    "../beside/../beside/secret",
    "x/../../../beside/secret",
    "modeling_evil.py",
    "tokenizer_config.json",
    "model-00001-of-00004.safetensors",
    INDEX,
    RECORD,
    ".keepmtp/cure.json",
    "config.json/x",
    "",
    ".",
    "..",
    "a\x00b",
    "\x1b[31m",
    "x" * 300,
)


def writing(kinds: tuple[Kind, ...]) -> Kind:
    """Cases of other kinds, for the cures instead."""

    def cured(rng: random.Random, kind: str) -> Case:
        case = rng.choice(kinds)(rng, kind)
        ways: list[tuple[str, ...]] = [("convert", "{}", "--to", dialect) for dialect in OTHER]
        ways += [
            ("fix", "{}"),
            ("fix", "{}", "--runtime", "sglang"),
            ("graft", "{}", "--from", "{}", "--replace"),
        ]
        words = (*rng.choice(ways), "--out", "{}.out", "--static-only")
        return replace(case, words=words, reads_weights=False, also=kept_values)

    return cured


# --- convert's record -----------------------------------------------------------------------------


def records(rng: random.Random, kind: str) -> Case:
    """keepmtp-convert.json of a stranger: files, tensors, configs, or anything."""
    base, dialect = rng.choice(list(BASES.items()))
    makes = (_file_edit, _tensor_edit, _tensor_edit, _config_edit, _any_edit)
    made = some(rng, lambda: rng.choice(makes)(rng))
    ways: list[tuple[str, ...]] = [("convert", "{}/there", "--to", dialect)] * 5
    ways += [("fix", "{}/there"), ("graft", "{}/there", "--from", "{}/release", "--replace")]
    return replace(_case(rng, kind, base, made, rng.choice(ways)), also=as_first)


def _case(
    rng: random.Random, kind: str, base: str, made: tuple[Edit, ...], words: tuple[str, ...]
) -> Case:
    end = rng.choice(
        (("--dry-run",), ("--dry-run", "--json"), *[("--out", "{}.out", "--static-only")] * 6)
    )
    return Case(
        kind=kind, base=base, edits=made, words=words + end, reads_weights=False, also=kept_values
    )


def _on_record(says: str, change: Callable[[Any], Any]) -> Edit:
    return edits.on_tree(f"there/{RECORD}", says, change)


def _file_edit(rng: random.Random) -> Edit:
    """The record names one more file."""
    name, content = (
        rng.choice((*FILES, *edits.NAMES)),
        rng.choice(("theirs", "{}", "", None, '{"a": 1}')),
    )
    edit = _on_record(
        f"configs has {edits.shown(name)}", lambda tree: tree["configs"].update({name: content})
    )
    return _with_room(edit, f"there/{RECORD}")


def _with_room(edit: Edit, file: str) -> Edit:
    """The edit, where {beside} is the folder that no call may touch."""

    def do(folder: Path) -> None:
        edit.do(folder)
        raw = (folder / file).read_bytes()
        edits.replace(
            folder / file, raw.replace(b"{beside}", str(folder.parent / "beside").encode())
        )

    return Edit(edit.says, do)


def _tensor_edit(rng: random.Random) -> Edit:
    """What the record says of one or two tensors."""
    one, two, word = rng.random(), rng.random(), edits.value(rng)
    leaf = rng.choice(
        (
            "weight",
            "weight_packed",
            "weight_scale",
            "weight_scale_2",
            "input_scale",
            "k_scale",
            "",
            "x",
        )
    )
    change = rng.choice(
        (
            {"hex": ""},
            {"hex": f"{rng.randrange(2**32):08x}"},
            {"hex": "00" * 4},
            {"hex": "zz"},
            {"shape": rng.choice(([], [1], [1, 1], [4], [0], [-1], [2**40]))},
            {"dtype": rng.choice(("I32", "U8", "BF16", "F16", "F33", ""))},
            {"dtype": rng.choice(("I32", "U32", "F32")), "hex": f"{rng.randrange(2**32):08x}"},
            {rng.choice(("name", "dtype", "shape", "hex", "more")): word},
        )
    )

    def state(tree: Any) -> None:
        told = tree["tensors"]
        told[_at(told, one)].update(change)

    def swap(tree: Any) -> None:
        told = tree["tensors"]
        here, there = _at(told, one), _at(told, two)
        told[here], told[there] = told[there], told[here]

    def rename(tree: Any) -> None:
        told = tree["tensors"]
        tensor = told[_at(told, one)]
        tensor["name"] = f"{_at(told, two).rpartition('.')[0]}.{leaf}"

    ways: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        (f"a tensor is {edits.shown(change)}", state),
        ("two tensors are swapped", swap),
        (f"a tensor is another module's {leaf}", rename),
    )
    edit = _on_record(*rng.choice(ways))
    return edit if rng.random() < 0.6 else _moved(rng)


def _at(names: Any, place: float) -> str:
    return list(names)[int(place * len(names))]


def _moved(rng: random.Random) -> Edit:
    """A tensor that the record need not name is said to be another one of its form, or itself in
    another form.
    """
    one, two = rng.random(), rng.random()
    leaf = rng.choice(("weight", "weight_scale", "weight_packed", "weight_scale_2", "input_scale"))
    is_itself, shape = rng.random() < 0.3, rng.choice((None, [], [1]))

    def do(folder: Path) -> None:
        theirs, was = read(folder / "there"), read(folder / "first")
        here = _at(sorted(name for name in theirs if name.endswith(leaf)), one)
        dtype, size, _ = theirs[here]
        like = sorted(
            name for name, tensor in was.items() if tensor[1] == size and tensor[0] == dtype
        )
        name = here if is_itself else _at(like, two)
        told = {"name": name, "dtype": dtype, "shape": list(size) if shape is None else shape}
        path = folder / "there" / RECORD
        tree = json.loads(path.read_bytes())
        tree["tensors"][here] = told
        edits.replace(path, json.dumps(tree).encode())

    return Edit(
        f"there/{RECORD}: {'itself' if is_itself else 'another'} for a {leaf} ({one:.3f}, "
        f"{two:.3f})",
        do,
    )


def _config_edit(rng: random.Random) -> Edit:
    """The config that the record restores is another; half of the time, so is the one that is
    there, and its sum.
    """
    key = rng.choice(
        (
            "auto_map",
            "rms_norm_eps",
            "num_hidden_layers",
            "architectures",
            "quantization_config",
            "x",
        )
    )
    new, how, is_pair = edits.value(rng), rng.random(), rng.random() < 0.5
    text = rng.choice(
        ("", "{", "[]", "null", "[" * 5000, "{}", '{"a": "\\ud800"}', "\ufeff{}", '{"a": NaN}')
    )

    def do(folder: Path) -> None:
        path, there = folder / "there" / RECORD, folder / "there" / CONFIG
        tree = json.loads(path.read_bytes())
        config = json.loads(tree["configs"][CONFIG])
        config[key] = new
        tree["configs"][CONFIG] = edits.text_of(config) if how < 0.6 else text
        if is_pair:
            config = json.loads(there.read_bytes())
            config["x"] = new
            edits.replace(there, edits.text_of(config).encode())
            tree["written"][CONFIG] = hashlib.sha256(there.read_bytes()).hexdigest()
        edits.replace(path, json.dumps(tree).encode())

    says = f"configs: {key} = {edits.shown(new)}" if how < 0.6 else f"configs: {edits.shown(text)}"
    return Edit(f"there/{RECORD}: {says}{' and the sum with it' if is_pair else ''}", do)


def _any_edit(rng: random.Random) -> Edit:
    file, way = f"there/{RECORD}", rng.random()
    if way < 0.2:
        return edits.no_file(rng, file)
    if way < 0.4:
        return edits.mangled(rng, file, 4000)
    key, word, new = (
        rng.choice(("keepmtp", "first", "configs", "written", "tensors", "x")),
        rng.random(),
        None,
    )
    new = edits.value(rng)
    return _on_record(
        f"{key} = {edits.shown(new)} ({word:.3f})", lambda tree: tree.update({key: new})
    )


# --- links and names ------------------------------------------------------------------------------


def links(rng: random.Random, kind: str) -> Case:
    """A file of the checkpoint, or of its release, is a link; mostly one that leads out."""
    base, where, words = _cure_of(rng)
    return _case(rng, kind, base, some(rng, lambda: _link(rng, where)), words)


def _cure_of(rng: random.Random) -> tuple[str, str, tuple[str, ...]]:
    """A base, the folder in it that is changed, and a verb that makes a new checkpoint of it."""
    base, dialect = rng.choice(list(BASES.items()))
    ways: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("first", ("convert", "{}/first", "--to", OTHER[dialect])),
        ("there", ("convert", "{}/there", "--to", dialect)),
        ("broken", ("fix", "{}/broken")),
        ("lost", ("graft", "{}/lost", "--from", "{}/release")),
        ("release", ("graft", "{}/lost", "--from", "{}/release")),
        ("release", ("quantize", "{}/release", "--scheme", "w4a16-fp8")),
    )
    where, words = rng.choice(ways)
    return base, where, words


def _link(rng: random.Random, where: str) -> Edit:
    name, target = rng.choice((*LINKS, *LINKS[:3] * 4)), rng.choice((*TARGETS, *TARGETS[:6] * 2))

    def do(folder: Path) -> None:
        path = folder / where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        beside = folder.parent / "beside"
        if target == "hop":
            (path.parent / "hop").symlink_to(beside / "secret")
        path.symlink_to(target.format(beside=beside))

    return Edit(f"{where}/{name}: is a link to {target}", do)


def names(rng: random.Random, kind: str) -> Case:
    """Files, shards and tensors with odd names."""
    base, where, words = _cure_of(rng)
    return _case(
        rng,
        kind,
        base,
        some(rng, lambda: rng.choice((_odd_file, _odd_shard, _odd_tensor))(rng, where)),
        words,
    )


def _odd_name(rng: random.Random) -> str:
    name = rng.choice(
        (*edits.NAMES, "-rf", "a'b\"c", "..x", "x..", "...", "$(id)", "%s{}", "\udcff")
    )[:200]
    return (
        name.replace("/", "\u2215").replace("\x00", "0").replace("\ud800", "\udc80").strip(".")
        or "..."
    )


def _odd_file(rng: random.Random, where: str) -> Edit:
    ends = (
        "",
        ".json",
        ".py",
        ".safetensors",
        ".partial",
        ".model",
        ".jinja",
        "/x.safetensors",
        "/x",
        "/x/y.py",
    )
    name = _odd_name(rng) + rng.choice(ends)

    def do(folder: Path) -> None:
        path = folder / where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"{}")

    return Edit(f"{where}: a file called {edits.shown(name)}", do)


def _odd_shard(rng: random.Random, where: str) -> Edit:
    """One shard, and its lines in the index, have another name."""
    name, place = rng.choice((_odd_name(rng), "../x", "sub/x", "model", "mtp_copies")), rng.random()

    def do(folder: Path) -> None:
        path = folder / where / INDEX
        tree = json.loads(path.read_bytes())
        old = _at(sorted(set(tree["weight_map"].values())), place)
        new = f"{name}.safetensors"
        tree["weight_map"] = {
            tensor: new if file == old else file for tensor, file in tree["weight_map"].items()
        }
        edits.replace(path, json.dumps(tree).encode())
        (folder / where / new).parent.mkdir(exist_ok=True)
        (folder / where / old).rename(folder / where / new)

    return Edit(f"{where}: a shard called {edits.shown(name)}", do)


def _odd_tensor(rng: random.Random, where: str) -> Edit:
    """A tensor has another name, in its shard and in the index; its bytes stay."""
    new, place = (
        rng.choice((*edits.NAMES, "model.layers.0.self_attn.q_proj.k_scale", "lm_head.bias")),
        rng.random(),
    )

    def do(folder: Path) -> None:
        path = folder / where / INDEX
        tree = json.loads(path.read_bytes())
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
        for name, told in header.items():
            if name != "__metadata__":
                found[name] = (
                    told["dtype"],
                    tuple(told["shape"]),
                    raw[slice(*told["data_offsets"])],
                )
    return found


def kept_values(case: Case, folder: Path, status: int) -> list[str]:
    """Tensors of a new checkpoint with other values than in the one that it was made of, where the
    command says yes.
    """
    out = Path(f"{folder}.out")
    if status or case.words[0] == "quantize" or not out.is_dir():
        return []
    made, had = read(out), read(folder / case.words[1].removeprefix("{}").strip("/"))
    both = sorted(name for name in made.keys() & had.keys() if made[name][:2] == had[name][:2])
    return [f"other values in {name!a}" for name in both if made[name] != had[name]][:3]


def as_first(case: Case, folder: Path, status: int) -> list[str]:
    """The same, and what a way back has otherwise than the first checkpoint: tensors, files, all
    but quantization.
    """
    out, faults = Path(f"{folder}.out"), kept_values(case, folder, status)
    if status or not out.is_dir():
        return faults
    wanted = {path.name for name in ("first", "there") for path in (folder / name).iterdir()} | {
        ".keepmtp"
    }
    wanted |= {RECORD}  # where the record is gone, it is a first conversion, which writes one
    graft = {"model-mtp-00001-of-00001.safetensors"} if case.words[0] == "graft" else set()
    faults += [f"a file {path.name!a}" for path in out.iterdir() if path.name not in wanted | graft]
    configs = [json.loads((each / CONFIG).read_bytes()) for each in (out, folder / "there")]
    one, other = ({**config, "quantization_config": None} for config in configs)
    faults += (
        []
        if json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
        else ["another config.json"]
    )
    if case.words[0] == "convert":
        made, was = read(out), read(folder / "first")
        faults += [
            f"not {name!a} as it was"
            for name in sorted(made.keys() | was.keys())
            if not _is_as(name, was, made)
        ]
    return faults[:3]


def _is_as(name: str, was: Tensors, made: Tensors) -> bool:
    if name not in was or name not in made or was[name][:2] != made[name][:2]:
        return False
    if was[name] == made[name]:
        return True
    values = [struct.unpack(f"<{len(each[name][2]) // 4}i", each[name][2]) for each in (was, made)]
    return was[name][0] == "F32" and all(
        abs(one - other) <= 1 for one, other in zip(*values, strict=True)
    )
