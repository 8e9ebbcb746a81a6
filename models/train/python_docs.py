"""Python's own documentation, to train on: the language reference of `help()` and the docstrings of
its library.

In: the standard library of the interpreter that runs this, and a split name. Out: passages of some
1,000 characters, the tokenizer that is trained on them, and batches of `SEQUENCE_LENGTH` tokens. A
module's passages look so:

    json.dumps(obj, *, skipkeys=False, ...)
        Serialize ``obj`` to a JSON formatted ``str``.

The easy thing to get wrong is to split by passage: two passages of one module share names and
phrases. Here the module, or the topic of the reference, decides: the CRC-32 of its name modulo 10
is 0 for held-out, 1 for calibration, anything else for train. A paragraph of the two small splits
that is nearly one of the training side is left out, too.

    python models/train/python_docs.py --out models/docs.jsonl --held-out models/docs_held_out.jsonl
"""

import ast
import random
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

import torch
from texts import EOS_ID, Batch, trained, write_files
from transformers import PreTrainedTokenizerFast

Split = Literal["train", "calibration", "held-out"]

VOCAB_SIZE = 2048
BATCH_SIZE = 8
SEQUENCE_LENGTH = 256
PASSAGE_CHARACTERS = 1000
NUM_WORDS_ALIKE = 8
MAX_SHARE_ALIKE = 0.25
OTHER_TERMS = {"asynchat", "asyncore", "http.cookies", "trace", "uu", "xmlrpc.client"}
"""Modules with other owners, by docs.python.org/3.11/license.html: their text is not shipped."""
_ONE_IN = 10
_SEEN_BEFORE: dict[Split, tuple[Split, ...]] = {
    "train": (),
    "calibration": ("train",),
    "held-out": ("train", "calibration"),
}
_NOT_LIBRARY = {
    "site-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "pydoc_data",
}


@cache
def documents(split: Split) -> dict[str, str]:
    """Texts of one split by the name of their module or topic, in the order of the names."""
    found = {f"topic {name}": text for name, text in topics.items()} | _docstrings()
    return {name: text for name, text in sorted(found.items()) if _split_of(name) == split}


@cache
def passages(split: Split) -> tuple[str, ...]:
    """Paragraphs that follow each other in one document, joined to `PASSAGE_CHARACTERS` or a little
    more.
    """
    known: set[tuple[str, ...]] = set()
    for other in _SEEN_BEFORE[split]:
        known.update(words for text in documents(other).values() for words in _runs(text))
    found: list[str] = []
    for name, text in documents(split).items():
        if split != "train" and name in OTHER_TERMS:
            continue
        kept: list[str] = []
        for paragraph in filter(str.strip, text.split("\n\n")):
            if split == "train" or not _is_alike(paragraph, known):
                kept.append(paragraph)
                known.update(_runs(paragraph))
        found += _joined(kept)
    return tuple(found)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on the training side."""
    return trained(passages("train"), vocab_size=VOCAB_SIZE, digits_apart=False)


def batches(tokenizer: PreTrainedTokenizerFast) -> Iterator[Batch]:
    """Endless stream: passages in a new order each round, each closed with `<eos>`, cut every
    `SEQUENCE_LENGTH` tokens.

    Every token has a weight of 1.
    """
    rng = random.Random(0)
    encoded = [[*tokenizer.encode(passage), EOS_ID] for passage in passages("train")]
    num_tokens = BATCH_SIZE * SEQUENCE_LENGTH
    left: list[int] = []
    while True:
        rng.shuffle(encoded)
        for ids in encoded:
            left += ids
            if len(left) >= num_tokens:
                ids_BT = torch.tensor(left[:num_tokens]).view(BATCH_SIZE, SEQUENCE_LENGTH)
                yield Batch(ids_BT=ids_BT, weight_BT=torch.ones(ids_BT.shape))
                left = left[num_tokens:]


def rows(*, held_out: bool) -> list[dict[str, str]]:
    """`text`, one passage each, in an order that mixes the documents: to judge a finished checkpoint
    on, or to calibrate on and to hold out of that.
    """
    texts = list(passages("held-out" if held_out else "calibration"))
    random.Random(0).shuffle(texts)
    return [{"text": text} for text in texts]


def _split_of(name: str) -> Split:
    rest = zlib.crc32(name.encode()) % _ONE_IN
    if rest == 0:
        return "held-out"
    if rest == 1:
        return "calibration"
    return "train"


def _library() -> Iterator[tuple[Path, ast.Module]]:
    """The modules of the standard library, by their path in it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if _NOT_LIBRARY.isdisjoint(path.with_suffix("").parts):
            yield path, ast.parse(file.read_text(encoding="utf-8"))


def _docstrings() -> dict[str, str]:
    """Signatures and docstrings of each module of the standard library that has any."""
    found: dict[str, str] = {}
    for path, module in _library():
        name = ".".join(part for part in path.with_suffix("").parts if part != "__init__")
        entries = list(_entries(module, name))
        found |= {name: "\n\n".join(entries)} if entries else {}
    return found


def _entries(node: ast.AST, name: str) -> Iterator[str]:
    """`name(arguments)` and the docstring, indented, of a node and of all that it holds."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        if text := ast.get_docstring(node):
            arguments = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
            indented = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
            yield f"{name}{arguments}\n{indented}"
        for child in node.body:
            yield from _entries(child, f"{name}.{getattr(child, 'name', '')}")


def _joined(paragraphs: Iterable[str]) -> Iterator[str]:
    kept: list[str] = []
    for paragraph in paragraphs:
        kept.append(paragraph)
        if sum(map(len, kept)) >= PASSAGE_CHARACTERS:
            yield "\n\n".join(kept)
            kept = []
    if kept:
        yield "\n\n".join(kept)


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    """All runs of `NUM_WORDS_ALIKE` words, in small letters; of a short text, the whole of it."""
    words = re.findall(r"\w+", text.lower())
    for start in range(max(1, len(words) - NUM_WORDS_ALIKE + 1)):
        yield tuple(words[start : start + NUM_WORDS_ALIKE])


def _is_alike(paragraph: str, known: set[tuple[str, ...]]) -> bool:
    """Whether more than `MAX_SHARE_ALIKE` of a paragraph's runs of words are in `known`."""
    runs = list(_runs(paragraph))
    return sum(run in known for run in runs) > MAX_SHARE_ALIKE * len(runs)


if __name__ == "__main__":
    write_files(rows)
