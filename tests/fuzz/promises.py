"""What a call may not do to files: touch what is beside its folder, copy its bytes, or say yes to
other values than the file's.

In: a case, its room, and the exit status. Out: which promises were broken, in words.
"""

import json
import os
import re
from pathlib import Path

from checked import check
from damage import header_of
from keepmtp.validate.report.card_metadata import read_front_matter
from kinds import Case

SECRET = b"a secret of tests/fuzz that no output may hold"
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def guard(room: Path) -> None:
    """Files that no call may touch or copy, beside the case's folder."""
    (room / "beside").mkdir()
    (room / "beside" / "secret").write_bytes(SECRET)
    (room / "beside" / "secret.json").write_bytes(json.dumps({"key": SECRET.decode()}).encode())


def seen(room: Path) -> dict[str, object]:
    """What tells a change of every file and link below a folder."""
    found: dict[str, object] = {}
    for where, folders, files in os.walk(room):
        for name in (*folders, *files):
            path = os.path.join(where, name)
            state = os.lstat(path)
            content = (state.st_ino, state.st_size, state.st_mtime_ns)
            if os.path.islink(path):
                content = (os.readlink(path), *content)
            elif name in folders:
                content = ()
            found[os.path.relpath(path, room)] = (state.st_mode, *content)
    return found


def broken(case: Case, room: Path, before: dict[str, object], status: int) -> list[str]:
    """Nothing outside its outputs changes, no secret is in them, and what they say is so."""
    folder = room / case.name
    return [
        *_of_files(case, room, before),
        *_of_values(case, folder, status),
        *_of_seals(case, folder, status),
    ]


def _of_files(case: Case, room: Path, before: dict[str, object]) -> list[str]:
    after = seen(room)
    changed = [path for path in {*before, *after} if before.get(path) != after.get(path)]
    may = [f"{case.name}/{own}" for own in case.writes]
    for folder in (case.name, f"{case.name}/NAME"):
        may += [f"{Path(folder)}{end}" for end in (".out", ".card", ".report")]
    faults = [f"writes {path!a}" for path in changed if not path.startswith((*may, "out"))]
    for path in changed:
        file = room / path
        if os.path.lexists(file) and file.lstat().st_uid != os.getuid():
            faults.append(f"{path!a} is another user's")
        if file.is_file() and not file.is_symlink() and SECRET in file.read_bytes():
            faults.append(f"a secret in {path!a}")
    return faults


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of the shards of a folder."""
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        header = header_of(path)
        raw = path.read_bytes()[8 + len(header) :]
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                data = raw[slice(*entry["data_offsets"])]
                found[name] = (entry["dtype"], tuple(entry["shape"]), data)
    return found


def _of_values(case: Case, folder: Path, status: int) -> list[str]:
    """Tensors of a new checkpoint with other values than in the one that it was made of."""
    out = Path(f"{folder}.out")
    if status or not {"fix", "--set"}.intersection(case.words) or not out.is_dir():
        return []
    if case.changes and (folder / "changed").exists():
        return ["takes a source that has changed"]
    new = tensors_of(out)
    old = tensors_of(folder / case.words[1].removeprefix("{}").strip("/"))
    both = sorted(name for name in new.keys() & old.keys() if new[name][:2] == old[name][:2])
    return [f"other values in {name!a}" for name in both if new[name] != old[name]][:3]


def _of_seals(case: Case, folder: Path, status: int) -> list[str]:
    """A good end though the headers fail, or a card with a tag that is none."""
    if not case.sealed:
        return []
    faults = []
    if not status and not check(folder / "NAME").ok:
        faults.append("green though its headers fail")
    card = Path(f"{folder}.card")
    if card.is_dir():
        tags = read_front_matter(card)["tags"]
        faults += [f"a tag {tag!a}" for tag in tags if not re.fullmatch(r"[\w.+-]{1,64}", str(tag))]
    return faults
