"""What a call may not touch: files beside its folder, whose bytes no output may hold, and all but
its outputs.

In: the room of a case. Out: which promises about files were broken, in words.
"""

import json
import os
from pathlib import Path

import corpus
from case import Case

SECRET = b"a secret of tests/fuzz that no output may hold"
_ENDS = (".out", ".page", ".card", ".report")


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
            is_folder = name in folders and not os.path.islink(path)
            link = ""
            if os.path.islink(path):
                link = os.readlink(path)
            content = (state.st_ino, state.st_size, state.st_mtime_ns)
            if is_folder:
                content = ()
            found[os.path.relpath(path, room)] = (state.st_mode, link, *content)
    return found


def left(case: Case, room: Path, before: dict[str, object]) -> list[str]:
    """Which promises about files a call has broken: nothing outside its outputs changes, and no
    secret is in them.
    """
    after = seen(room)
    changed = [path for path in {*before, *after} if before.get(path) != after.get(path)]
    folders = {
        Path(case.name).as_posix(),
        (Path(case.name) / corpus.checkpoint_in(case.base)).as_posix(),
    }
    may = tuple(f"{folder}{end}" for folder in folders for end in _ENDS)
    may += tuple(f"{case.name}/{own}" for own in case.writes)
    faults = [f"writes {path!a}" for path in changed if not path.startswith((*may, "out"))]
    for path in changed:
        file = room / path
        if os.path.lexists(file) and file.lstat().st_uid != os.getuid():
            faults.append(f"{path!a} is another user's")
        if file.is_file() and not file.is_symlink() and SECRET in file.read_bytes():
            faults.append(f"a secret in {path!a}")
    return faults
