"""Asks a version of vLLM what can be asked without importing it; `follow.py --write` writes the
answers into recipes/runtimes/vllm.json.

In: the folder with vllm/ in it. Out: an entry of vllm.json.
`SpeculativeConfig.hf_config_override`, where vLLM finds the draft of a model, is cut out of its
file and run for every name in it. The rest is read: types, a table, a raise.

Easy to get wrong: vLLM finds Nemotron Omni's draft by its architecture and by the model_type of its
language model together.
"""

import ast
import copy
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from keepmtp.recipes.runtimes.vllm import FILE
from packaging.version import Version

# Minor versions that keepmtp answers for, the newest ones: an older one leaves vllm.json.
WINDOW = 3
OVERRIDE = "hf_config_override"
GENERATING = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")  # of registry.py
OPTIONS = ("draft_lm_head_quantization", "rejection_sample_method")
# The one checkpoint of an MTP block alone that was published; other types of drafts are vLLM's own.
BLOCK_ALONE = {"minimax_m3_mtp", "MiniMaxM3MTP"}


class Config:
    """A config.json that has whatever the function looks for."""

    def __init__(self, model_type: str, architecture: str, inner: str) -> None:
        self.model_type, self.architectures, self.inner = model_type, [architecture], inner

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_"):
            raise AttributeError(key)
        if key in ("text_config", "decoder") and self.inner:
            return Config(self.inner, self.architectures[0], "")
        if key.endswith("_types"):
            return ["full_attention"]
        if key == "text_config":
            return self
        return {"num_nextn_predict_layers": 1} if key.endswith("_config") else 1

    def get_text_config(self) -> "Config":
        return self.text_config

    def update(self, changes: Mapping[str, Any]) -> None:
        vars(self).update(changes)


def ask(site: Path) -> dict[str, Any]:
    """What the vLLM in a folder says; the keys are those of `Asked`."""
    speculative = ast.parse((site / "vllm/config/speculative.py").read_text())
    quantization = site / "vllm/model_executor/layers/quantization/__init__.py"
    methods = ast.parse(quantization.read_text())
    override = next(node for node in functions(speculative) if node.name == OVERRIDE)
    run, drafts = runnable(override), set(values(speculative, "MTPModelTypes"))

    def is_drafted(model_type: str, architecture: str, inner: str = "") -> bool:
        return run(Config(model_type, architecture, inner)).model_type in drafts

    refused = dict(refusals(speculative))
    names = {name for name in strings(override) if name.isidentifier()} - drafts - {*refused}
    model_types = {name for name in names if is_drafted(name, "none")}
    architectures = set[str]()
    for name in names - model_types:
        if any(is_drafted("none", name, inner) for inner in ("none", *model_types)):
            architectures.add(name)
    alone = BLOCK_ALONE.intersection(strings(override))
    registry = site / "vllm/model_executor/models/registry.py"
    models = ast.parse(registry.read_text())
    return {
        "models": sorted(key for table in GENERATING for key in keys(models, table)),
        "model_types": sorted(model_types | (alone & drafts)),
        "architectures": sorted(architectures | (alone - drafts)),
        "refused": refused,
        "any_model": '"TransformersForMTP"' in registry.read_text(),
        "methods": sorted(values(methods, "QuantizationMethods")),
        "deprecated_methods": values(methods, "DEPRECATED_QUANTIZATION_METHODS"),
        "options": {name: found for name in OPTIONS if (found := values(speculative, name))},
    }


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def strings(tree: ast.AST) -> list[str]:
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str)]


def values(tree: ast.AST, name: str) -> list[str]:
    """The words of a Literal, a list, or of the field of a class that has such a type."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return strings(node.value)
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name:
            named = node.annotation
            return values(tree, named.id) if isinstance(named, ast.Name) else strings(named)
    return []


def keys(tree: ast.AST, name: str) -> list[str]:
    """Those of a table at the top of the module."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        if getattr(node.targets[0], "id", "") == name:
            return strings(ast.List([key for key in node.value.keys if key], ast.Load()))
    return []


def refusals(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """model_type -> the words that an `if` about it alone raises."""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)):
            continue
        says = " ".join(strings(node.body[0]))
        if "model_type" in ast.unparse(node.test) and "MTP draft" in says:
            (model_type,) = strings(node.test)
            yield model_type, says


def runnable(override: ast.FunctionDef) -> Callable[[Config], Config]:
    """vLLM's function without the module around it; numbers that it imports are 1."""
    function, names = copy.deepcopy(override), dict[str, Any]()
    function.decorator_list, function.returns = [], None
    for argument in function.args.args:
        argument.annotation = None
    for node in ast.walk(function):
        if isinstance(node, ast.If):
            imports = [line for line in node.body if isinstance(line, ast.ImportFrom)]
            names |= {alias.name: 1 for line in imports for alias in line.names}
            node.body = [line for line in node.body if line not in imports]
    names |= {"copy": copy, "get_hf_text_config": Config.get_text_config}
    exec(compile(ast.Module([function], []), OVERRIDE, "exec"), names)
    return names[OVERRIDE]


def write_down(version: str, site: Path) -> None:
    """Add a version's answers to vllm.json, which keeps the newest."""
    found = json.loads(FILE.read_text()) | {version: ask(site)}
    kept = {each: found[each] for each in sorted(found, key=Version)[-WINDOW:]}
    FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
