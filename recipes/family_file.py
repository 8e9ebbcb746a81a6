"""Reads the table of a family, recipes/families/<model_type>.yaml.

In: the file, and `_shared.yaml` for the blocks and layouts that many families have. Out: a
`Family`. The keys are the attributes of `Family`, `Layout`, `Draft` and `Loader`. A layout may be
the name of a shared one, or differ from one (`use`); so may a draft and a loader. Without layouts a
family has the shared one `inlined`, and a draft has the model_type of its family.

A block is a list of groups of modules. A group is the name of another block, of the file's own
`blocks` or a shared one; or a mapping with attributes of `Row` for all of its modules, and these
keys:

    modules      paths on disk; or for each path on disk the one in vLLM
    shaped       paths on disk, each with its sides, where they differ
    fused        vLLM's module that the modules are parts of; they have one global scale
    use          a block, instead of modules; the group's attributes are set in each of its rows
    at           where all paths of the group begin; `on_disk` and `in_vllm` where that differs
    parts        how many modules a path with `{part}` means
    width        words for `intermediate_size` in the sides of a block that is used

What holds for some versions of vLLM alone is in a mapping under a key such as `vllm<0.33`; its keys
replace the others. So do those under `dspark`, for releases that draft by DSpark; its `mtp_top` is
that of every layout.

Easy to get wrong: where there is a reason to keep a module, vLLM's has no slots for scales
(`loads_quantized`) unless it is a head or in a vision tower, or the group says so. The usual
reasons are in `_shared.yaml`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .family import Alias, Draft, Family, Layout, Loader, Renames, Row, Stem
from .frozen import Json, Raw, without
from .runtimes.vllm import holds
from .yaml_file import load_shipped

FOLDER = Path(__file__).parent / "families"
_ASKED = ("head", "vision")
Blocks = Mapping[str, Sequence[str | Raw]]


def read_family(path: Path, vllm: str) -> Family:
    """The table in a file, for a version of vLLM; a key that nothing has is a TypeError."""
    raw: Json = _of_version(load_shipped(path), vllm)
    dspark = raw.pop("dspark", None)
    family = _family(raw)
    if dspark is None:
        return family
    mtp_top = dspark.pop("mtp_top")
    layouts = dict[str, Json]()
    for name, layout in raw["layouts"].items():
        layouts[name] = layout | {"mtp_top": mtp_top}
    return replace(family, dspark=_family(raw | {"layouts": layouts, "method": "dspark"} | dspark))


def _family(raw: Raw) -> Family:
    fields = dict(raw)
    blocks = _shared()["blocks"] | fields.pop("blocks", {})
    for key in ("block", "linear_block", "mtp_block"):
        fields[key] = _rows(fields.get(key, ()), blocks)
    layouts = dict[str, Layout]()
    for name, layout in fields.get("layouts", {"*": "inlined"}).items():
        layouts[name] = _layout(layout, blocks)
    fields["layouts"] = layouts
    fields["aliases"] = [Alias(**alias) for alias in fields.get("aliases", ())]
    fields["loader"] = Loader(**_fields(_used("loaders", fields.get("loader", {}))))
    if fields.get("draft"):
        draft = {"model_type": raw["model_type"]} | _used("drafts", fields["draft"])
        fields["draft"] = Draft(**_fields(draft))
    return Family(**_fields(fields))


@cache
def _shared() -> Raw:
    return load_shipped(FOLDER / "_shared.yaml")


def _of_version(value: Any, vllm: str) -> Any:
    if isinstance(value, list):
        return [_of_version(item, vllm) for item in value]
    if not isinstance(value, dict):
        return value
    found: Json = {}
    for key, inner in value.items():
        if not key.startswith("vllm"):
            found[key] = _of_version(inner, vllm)
        elif holds(key.removeprefix("vllm"), vllm):
            found |= _of_version(inner, vllm)
    return found


def _layout(raw: str | Raw, blocks: Blocks) -> Layout:
    if isinstance(raw, str):
        raw = {"use": raw}
    given = _used("layouts", raw)
    for key in ("top", "mtp_top", "vision"):
        if key in given:
            given[key] = _rows(given[key], blocks)
    for key in ("layers", "mtp"):
        stem = given.get(key)
        if isinstance(stem, str):  # the same on disk and in vLLM
            stem = {"disk": stem, "runtime": stem}
        if stem:
            given[key] = Stem(**stem)
    for key in ("renames", "draft_renames"):
        if key in given:
            given[key] = Renames(**given[key])
    opaque = []
    for disk, runtime in given.get("opaque", {}).items():
        opaque.append((disk, runtime, "vision"))
    given["opaque"] = opaque
    return Layout(**_fields(given))


def _used(kind: str, raw: Raw) -> Json:
    """With what it does not say itself of the shared one that it uses."""
    return {**_shared()[kind].get(raw.get("use"), {}), **without(raw, "use")}


def _rows(groups: Sequence[str | Raw], blocks: Blocks) -> tuple[Row, ...]:
    rows: list[Row] = []
    for group in groups:
        if isinstance(group, str):
            rows += _rows(blocks[group], blocks)
            continue
        fields = _fields(group)
        at = fields.pop("at", "")
        on_disk = fields.pop("on_disk", at)
        in_vllm = fields.pop("in_vllm", at)
        used = fields.pop("use", "")
        if not used:
            listed = _listed(**fields)
        else:
            width = fields.pop("width", "intermediate_size")
            # Modules of some roles are always kept.
            usual = _shared()["why_kept"].get(fields.get("role"), "")
            why_kept = fields.pop("why_kept", usual)
            listed = []
            for row in _rows(blocks[used], blocks):
                # A row's own reason says more than that of the group which uses its block.
                reason = row.why_kept or why_kept
                sides = [side.replace("intermediate_size", width) for side in row.sides]
                changed = {"sides": tuple(sides), **fields, "why_kept": reason}
                listed.append(replace(row, **changed))
        for row in listed:
            rows.append(_moved(row, on_disk, in_vllm))
    return tuple(rows)


def _listed(
    *,
    role: Any,
    modules: tuple[str, ...] | Mapping[str, str] = (),
    shaped: Mapping[str, Sequence[str]] = MappingProxyType({}),
    fused: str = "",
    parts: int = 1,
    **fields: Any,
) -> list[Row]:
    """The rows of a group that lists its modules."""
    usual = _shared()["why_kept"].get(role, "")
    why_kept = fields.pop("why_kept", usual)
    fields.setdefault("sides", tuple(_shared()["sides"].get(role, ())))
    runtime: str = fields.pop("runtime", fused)
    # vLLM's module has slots for scales unless there is a reason to keep it; of heads, towers and
    # usual glue the config decides.
    is_asked = role in _ASKED or (role == "glue" and why_kept == usual)
    fields = {"shares": fused, "loads_quantized": not why_kept or is_asked} | fields
    if isinstance(modules, tuple):
        modules = dict.fromkeys((*modules, *shaped), runtime)
    rows = list[Row]()
    for path, in_vllm in modules.items():
        if path in shaped:
            fields["sides"] = tuple(shaped[path])
        for part in range(parts):
            numbered = path.replace("{part}", str(part))
            row = Row(path=numbered, role=role, runtime=in_vllm, why_kept=why_kept, **fields)
            rows.append(row)
    return rows


def _moved(row: Row, on_disk: str, in_vllm: str) -> Row:
    """The row below a module."""
    path = _below(on_disk, row.path)
    runtime = _below(in_vllm, row.in_vllm)
    aliases = [_below(in_vllm, alias) for alias in row.aliases]
    if runtime == path:
        runtime = ""
    # vLLM asks for an expert's projection by the path in vLLM.
    if "{e}" in path and on_disk != in_vllm:
        aliases.insert(0, _below(in_vllm, row.path))
    return replace(
        row,
        path=path,
        runtime=runtime,
        shares=_below(on_disk, row.shares),
        unit=_below(on_disk, row.unit),
        aliases=tuple(aliases),
    )


def _below(outer: str, path: str) -> str:
    if outer and path:
        return f"{outer}.{path}"
    return path


def _fields(raw: Raw) -> Json:
    """With tuples for lists."""
    fields: Json = {}
    for key, value in raw.items():
        # What is in a mapping stays: it is a part of a config.json.
        fields[key] = _frozen(value)
    return fields


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple([_frozen(item) for item in value])
    return value
