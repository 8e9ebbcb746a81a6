"""SGLang's own classes as a judge: what they build for the modules of a config.json.

In: config.json and a part. Out: the class, and a `Built` for each module that it asks its
quantization config about.

Easy to get wrong: SGLang is not installed. Its wheel, which `make test` downloads without
dependencies, is unpacked, and sglang_peer.py constructs its classes without kernels, in a process
of its own.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import captured

WHEEL = Path(os.environ.get("SGLANG_WHEEL", Path(__file__).parents[2] / "build" / "sglang"))
PEER = Path(__file__).with_name("sglang_peer.py")
_PLAIN = {"no config", "None", "UnquantizedLinearMethod", "UnquantizedFusedMoEMethod"}


class Question(NamedTuple):
    """A config.json, and the part whose class is asked for."""

    config: Mapping[str, Any]
    part: str


class Built(NamedTuple):
    """What SGLang builds for a module: `plain`, `raises`, or a scheme in a word; and its own words
    for that.
    """

    word: str
    says: str


class Class(NamedTuple):
    """SGLang's class for a part; without a name where it has none, without modules where nothing
    constructs it here.
    """

    name: str
    modules: Mapping[str, Built]
    error: str


def ask(questions: Sequence[Question]) -> list[Class]:
    """SGLang's answers; skips where there is no wheel."""
    sent = json.dumps([question._asdict() for question in questions])
    if not (WHEEL / "sglang").is_dir():
        pytest.skip("no unpacked wheel of SGLang in build/sglang")
    command = [sys.executable, str(PEER), str(WHEEL)]
    done = captured(command, input=sent, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    assert lines, done.stderr[-3000:]
    return [_class(answer) for answer in json.loads(lines[0].removeprefix("ANSWERS"))]


def _class(answer: Mapping[str, Any]) -> Class:
    error = answer.get("not_constructed") or answer.get("config_error") or ""
    modules = {
        module["prefix"]: _built(module)
        for module in answer.get("modules", ())
        if module["class"] not in ("VocabParallelEmbedding", "RadixAttention")
    }
    return Class(answer.get("class", ""), modules, error)


def _built(module: Mapping[str, Any]) -> Built:
    method, scheme = module["answer"]
    if method in _PLAIN:
        return Built("plain", method)
    if method.endswith("Error"):
        return Built("raises", f"{method}: {scheme}")
    name = method if scheme == "None" else scheme
    low = name.lower()
    words = {"mxfp4": "mxfp4", "fp4": "nvfp4", "fp8": "fp8", "wna16": "int_packed", "int8": "int8"}
    return Built(next((word for part, word in words.items() if part in low), name), name)
