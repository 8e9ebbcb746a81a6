"""The files of a checkpoint besides its weights: which of them an output gets, and which it does
not.

In: a folder, or the names of a repository's files. Out: `Companions`: names to carry over, the
checkpoint's own Python, and the names of everything else.

Easy to get wrong: an output may be published, so a file is carried only if its name is known, and
never through a link that leaves the folder. A link may lead to any file of the person who runs
keepmtp, and a stray file may hold a token.
"""

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from ..recipes.errors import CheckpointError
from ..recipes.frozen import frozen
from .record import RECIPE, RECORD

INDEX = "model.safetensors.index.json"
# Compared in lower case.
_KNOWN = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model*",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*chat_template*.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "*processor_config.json",
    "configuration.json",
    # MiMo-V2.5's: vLLM reads this folder next to the weights, and goes on without audio if it is
    # missing.
    "audio_tokenizer/*.json",
    "audio_tokenizer/*.jinja",
    "audio_tokenizer/model.safetensors",
    "license*",
    "licence*",
    "notice*",
    "copying*",
    "third_party_notices*",
    "use_policy*",
)
_CODE = ("*.py", "encoding/*.py")
HF_QUANT_CONFIG = "hf_quant_config.json"
"""Where modelopt says how the modules are quantized; vLLM asks it where config.json does not."""
REWRITTEN = ("config.json", INDEX, HF_QUANT_CONFIG, "quantize_config.json", RECIPE, RECORD)
"""Read, if they are there, and never copied."""


@frozen
class Companions:
    """Names with forward slashes, sorted.

    Attributes:
        carried: tokenizer, templates, generation settings, licence, and a tokenizer of sounds with
            its weights.
        code: the checkpoint's own Python, which is carried only if the user trusts it.
        left: everything else but weights and what keepmtp writes anew; a folder has a slash at its
            end.
    """

    carried: tuple[str, ...]
    code: tuple[str, ...]
    left: tuple[str, ...]


def companions_in(folder: Path) -> Companions:
    """The companions of a local checkpoint.

    Raises:
        CheckpointError: one that would be carried is a link out of the folder, or to nowhere.
    """
    # Files of the folder and of its own folders, no deeper: a linked folder is one name.
    names = []
    for entry in os.scandir(folder):
        if not entry.is_dir(follow_symlinks=False):
            names.append(entry.name)
            continue
        inner = []
        for file in os.scandir(entry):
            if not file.is_dir(follow_symlinks=False):
                inner.append(f"{entry.name}/{file.name}")
        names += inner or [f"{entry.name}/"]
    companions = companions_among(names)
    for name in (*companions.carried, *companions.code):
        inside(folder, name)
    return companions


def companions_among(names: Iterable[str]) -> Companions:
    """The companions among the names of a repository's files."""
    carried = []
    code = []
    left = set()
    for name in sorted(names):
        is_known = _is_one_of(name, _KNOWN)
        if (
            name.startswith(".")
            or name in REWRITTEN
            or (name.endswith(".safetensors") and not is_known)
        ):
            continue
        if _is_one_of(name, _CODE):
            code.append(name)
        elif is_known:
            carried.append(name)
        else:
            top, slash, _ = name.partition("/")
            left.add(top + slash)
    return Companions(carried=tuple(carried), code=tuple(code), left=tuple(sorted(left)))


def inside(folder: Path, name: str) -> Path:
    """The path of a file of a checkpoint, once it is known to be in that checkpoint.

    A snapshot of the Hub's cache is a folder of links to `blobs/` of the same repository: those are
    its own files.

    Raises:
        CheckpointError: a link that leaves the folder, or one to nowhere.
    """
    path = folder / name
    # `resolve` raises on a link to itself.
    home = Path(os.path.realpath(folder))
    target = Path(os.path.realpath(path))
    is_inside = target.is_relative_to(home)
    if home.parent.name == "snapshots":
        is_inside |= target.is_relative_to(home.parent.parent / "blobs")
    if not is_inside:
        raise CheckpointError(
            path,
            "a file of a checkpoint must be in its folder",
            got=f"a link to {target}",
            cure="Put a copy of the file there if it belongs to the checkpoint, or remove the link",
        )
    if not path.is_file():
        got = "a link to nowhere"
        if path.exists():
            got = "something else"
        raise CheckpointError(
            path, "must be a regular file", got=got, cure="Restore it, or remove it"
        )
    return path


def _is_one_of(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether a name fits a pattern; a star never takes a slash."""
    for pattern in patterns:
        if name.count("/") == pattern.count("/") and fnmatchcase(name.lower(), pattern):
            return True
    return False
