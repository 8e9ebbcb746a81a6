"""vLLM, version by version: what it was asked, and for which versions a statement holds.

In: a version, as vLLM says it. Out: what `benchmarks/ask_vllm.py` read in that version (vllm.json):
the models that method=mtp drafts for, those that it refuses, its quantization methods, and the
values that some options take. What only a reader of vLLM's code can know is written by hand, with
the versions for which it holds (a PEP 440 specifier such as ">=0.33"; "" holds for all).

Easy to get wrong: a nightly build, 0.33.0rc1.dev9, comes before 0.33.0 and mostly is 0.33.0.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ..frozen import Raw, frozen

FILE = Path(__file__).with_suffix(".json")


@frozen
class Asked:
    """What a version of vLLM says, as vllm.json has it.

    Attributes:
        models: the architectures that it has a class for which writes text.
        model_types, architectures: what it finds an MTP draft by.
        refused: model_type -> its answer to method=mtp where it has a draft of another kind.
        any_model: its classes for transformers' models (`--model-impl transformers`) draft for any
            text model whose config.json has `num_mtp_layers`.
        methods, deprecated_methods: of quantization.
        options: option of --speculative-config -> the values that it takes.
    """

    models: frozenset[str]
    model_types: frozenset[str]
    architectures: frozenset[str]
    refused: Mapping[str, str]
    any_model: bool
    methods: frozenset[str]
    deprecated_methods: frozenset[str]
    options: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, raw: Raw) -> "Asked":
        """From an entry of vllm.json; options and answers stay mappings."""
        sets = {key: frozenset(value) for key, value in raw.items() if isinstance(value, list)}
        return cls(**{**raw, **sets})


_ASKED: Raw = json.loads(FILE.read_text(encoding="utf-8"))
KNOWN = tuple(_ASKED)
"""The versions that were asked, the oldest first."""
NEWEST = KNOWN[-1]


@cache
def asked(version: str = NEWEST) -> Asked:
    """What a version says; of one that was not asked, the newest one before it, else the oldest."""
    before = [known for known in KNOWN if parsed(known) <= parsed(version)]
    return Asked.of(_ASKED[[KNOWN[0], *before][-1]])


def minor(version: str) -> str:
    """The release line: 0.33 of 0.33.0."""
    return ".".join(map(str, parsed(version).release[:2]))


@cache
def holds(versions: str, version: str) -> bool:
    """Whether a statement about the versions of a specifier holds for a version."""
    return parsed(version) in SpecifierSet(versions)


def is_known(version: str) -> bool:
    """Whether it is of a release line that was asked."""
    return minor(version) in map(minor, KNOWN)


def parsed(version: str) -> Version:
    """The release that a build belongs to; a build without a number counts as the newest."""
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return Version(NEWEST)
