"""The kind of fuzz cases whose hostile file is a wheel for `check --vllm`, and the Python in it.

In: a random generator. Out: a `Case`, as in kinds.py, which lists it.

Easy to get wrong: what a wheel's Python does is not under test, only how keepmtp takes its end and
its answers. The Python of verbs.no_server runs vllm/__init__.py, and nothing else of it.
"""

import io
import struct
import zipfile
from pathlib import Path
from random import Random

import corpus
import edits
from case import Case
from data_files import spelled
from edits import ODD, Edit

WHEEL = "vllm-9.1.0-py3-none-any.whl"
ABOUT = "vllm-9.1.0.dist-info/METADATA"
NOTED = "vllm/_version.py"
Members = dict[str, bytes]
GOOD: Members = {
    "vllm/__init__.py": b"",
    NOTED: b"__version__ = version = '9.1.0'\n",
    ABOUT: b"Metadata-Version: 2.1\nName: vllm\nVersion: 9.1.0\nRequires-Python: >=3.8\n",
}
# Where a field of the list of members is, after its mark: size in bytes and place.
FIELDS = {"flags": ("<H", 8), "method": ("<H", 10), "packed": ("<I", 20), "size": ("<I", 24)}
FIELDS |= {"name": ("<H", 28), "extra": ("<H", 30), "offset": ("<I", 42)}


def zipped(members: Members) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in members.items():
            packed.writestr(name, content)
    return raw.getvalue()


def listed(raw: bytes, at: int, field: str, value: int) -> bytes:
    """The zip with another value in the list of its members, of the member `at`."""
    form, place = FIELDS[field]
    start = 0
    for _ in range(at + 1):
        start = raw.index(b"PK\1\2", start + 1)
    changed = bytearray(raw)
    struct.pack_into(form, changed, start + place, value % 2 ** (8 * struct.calcsize(form)))
    return bytes(changed)


def _wheel(says: str, raw: bytes) -> Edit:
    return Edit(f"{WHEEL}: {says}", lambda folder: edits.replace(folder / WHEEL, raw))


def _with(members: Members) -> Edit:
    says = ", ".join(f"{edits.shown(name)} is {edits.shown(members[name])}" for name in members)
    return _wheel(says, zipped(GOOD | members))


def _edit(rng: Random) -> Edit:
    way = rng.random()
    if way < 0.3:
        return _with({rng.choice((ABOUT, NOTED)): spelled(rng.choice(ODD["told"])).encode("latin")})
    if way < 0.45:
        return _with({"vllm/__init__.py": rng.choice(ODD["programs"]).encode()})
    if way < 0.6:
        return _with({rng.choice(ODD["members"]): b"x = 1\n"})
    if way < 0.8:
        field = rng.choice(list(FIELDS))
        value = rng.choice((0, 1, 12, 14, 99, 0x800, 2**31, -1))
        raw = listed(zipped(GOOD), rng.randrange(3), field, value)
        return _wheel(f"{field} is {value}", raw)
    inner = edits.mangled(rng, WHEEL, 700)
    if rng.random() < 0.2:
        inner = edits.no_file(rng, WHEEL)

    def do(folder: Path) -> None:
        edits.replace(folder / WHEEL, zipped(GOOD))
        inner.do(folder)

    return Edit(inner.says, do)


def wheels(rng: Random) -> Case:
    """A wheel of a stranger for check --vllm."""
    words = ("check", "{}", "--gpu", "sm90", "--vllm", f"{{}}/{WHEEL}")
    return Case(base=corpus.REAL[0], edits=(_edit(rng),), words=words, reads_weights=False)
