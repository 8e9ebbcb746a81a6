"""Good checkpoints, and the same ones broken on purpose: each by one change that somebody made in the field.

In: nothing. Out: GOOD, name -> `Checkpoint`, and BROKEN, a table of `Case`. A case's name starts with the
number in docs/failures.md of what was met.

Everything is headers: files are written with holes where the weights would be.
"""

import json
import re
import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import checkpoints
from keepmtp.quantize.plan import Plan, make_plan
from keepmtp.quantize.quant_config import quantization_config, runtime_modules
from keepmtp.quantize.source import Entry, Source
from keepmtp.recipes.families import find_family
from keepmtp.recipes.family import QUANTIZABLE_ROLES, HFName
from keepmtp.recipes.schema import Recipe
from keepmtp.recipes.schemes import SCHEMES, num_bytes

INDEX = "model.safetensors.index.json"
_CALIBRATION = {
    "algorithm": "minmax", "dataset": "d", "dataset_revision": "r", "split": "s", "samples": 1, "sequence_length": 1,
    "seed": 0,
}  # fmt: skip


@dataclass
class Checkpoint:
    """What is about to be written.

    Attributes:
        config: config.json.
        tensors: name -> dtype, shape.
        json_files: further JSON files.
        elsewhere: tensors for a file that the index does not list.
        index: changes the index before it is written.
        after: changes the folder once everything is written.
    """

    config: dict[str, Any]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    json_files: dict[str, Any] = field(default_factory=dict)
    elsewhere: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    index: Callable[[dict[str, Any]], None] | None = None
    after: Callable[[Path], None] | None = None

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config["quantization_config"]

    def take(self, pattern: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Remove the tensors whose whole name matches, and return them; at least one must."""
        taken = {name: self.tensors.pop(name) for name in list(self.tensors) if re.fullmatch(pattern, name)}
        assert taken, pattern
        return taken

    def rename(self, pattern: str, replacement: str) -> None:
        for name, spec in self.take(pattern).items():
            self.tensors[re.sub(pattern, replacement, name)] = spec

    def retype(self, pattern: str, dtype: str | None = None, shape: "Shape | None" = None) -> None:
        for name, (old, size) in self.take(pattern).items():
            self.tensors[name] = (dtype or old, shape(*size) if shape else size)


Change = Callable[[Checkpoint], object]
Shape = Callable[..., tuple[int, ...]]


@dataclass(frozen=True)
class Case:
    name: str
    base: str
    breaks: Change
    rule: str
    where: str
    severity: str = "error"
    says: str = ""


def write(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint's headers, in two shards and an index."""
    folder.mkdir(parents=True)
    names = list(checkpoint.tensors)
    halves = {"model-1.safetensors": names[: len(names) // 2], "model-2.safetensors": names[len(names) // 2 :]}
    for file, half in halves.items():
        _write_shard(folder / file, {name: checkpoint.tensors[name] for name in half})
    if checkpoint.elsewhere:
        _write_shard(folder / "mtp.safetensors", checkpoint.elsewhere)
    index = {
        "metadata": {"total_size": sum(num_bytes(*spec) for spec in checkpoint.tensors.values())},
        "weight_map": {name: file for file, half in halves.items() for name in half},
    }
    if checkpoint.index:
        checkpoint.index(index)
    for file, content in {INDEX: index, "config.json": checkpoint.config, **checkpoint.json_files}.items():
        (folder / file).write_text(json.dumps(content))
    if checkpoint.after:
        checkpoint.after(folder)
    return folder


def as_source(checkpoint: Checkpoint, folder: Path) -> Source:
    """The checkpoint as it would be opened, without writing it. `folder` is where JSON files are looked for."""
    entries, end = {}, 0
    for name, (dtype, shape) in checkpoint.tensors.items():
        size = num_bytes(dtype, shape)
        entries[HFName(name)] = Entry(
            name=HFName(name), file="model.safetensors", dtype=dtype, shape=shape, start=end, num_bytes=size
        )
        end += size
    return Source(
        where="built", revision="local", folder=folder, config=checkpoint.config, entries=entries, unindexed={},
        companions=(),
    )  # fmt: skip


def _write_shard(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)


# --- good ones ------------------------------------------------------------------------------------------------------


def released(model: str, **changes: Any) -> Checkpoint:
    """The original release, tiny."""
    config, tensors = checkpoints.source_layout(model, size="tiny", changes=changes)
    return Checkpoint(config=config, tensors=dict(tensors))


@cache
def planned(model: str, scheme: str, mtp: str, size: str = "tiny", **changes: Any) -> Plan:
    """Our plan for a model: one scheme for the whole backbone, and a policy for the MTP block."""
    config, tensors = checkpoints.source_layout(model, size=size, changes=changes)
    source = as_source(Checkpoint(config=config, tensors=dict(tensors)), Path("/nonexistent"))
    view = find_family(config, model).view(config)
    places = [view.place(HFName(name)) for name in tensors]
    roles = {p.role for p in places if p and p.part == "backbone" and not p.row.why_kept} & set(QUANTIZABLE_ROLES)
    calibrated = any(SCHEMES[word].needs_calibration for word in (scheme, mtp) if word in SCHEMES)
    recipe = Recipe.model_validate({
        "model": model, "variant": scheme.lower(), "default": False, "summary": "", "family": config["model_type"],
        "source": "local", "revision": "local", "backbone": dict.fromkeys(roles, scheme), "mtp": mtp,
        "calibration": _CALIBRATION if calibrated else None,
    })  # fmt: skip
    return make_plan(recipe, source)


def ours(model: str, scheme: str, mtp: str = "bf16", size: str = "tiny", **changes: Any) -> Checkpoint:
    """What keepmtp writes: the plan's tensors and its quantization config."""
    plan = planned(model, scheme, mtp, size, **changes)
    config = {key: value for key, value in plan.source.config.items() if key != "quantization_config"}
    tensors = {str(output.name): (output.dtype, output.shape) for tensor in plan.tensors for output in tensor.outputs}
    return Checkpoint(config=deepcopy(config) | {"quantization_config": quantization_config(plan)}, tensors=tensors)


def llmcompressor(model: str, scheme: str, mtp: str = "bf16") -> Checkpoint:
    """The same tensors under a config as llm-compressor writes it: target Linear, and whole names to ignore."""
    checkpoint = ours(model, scheme, mtp)
    names = [name for module in runtime_modules(planned(model, scheme, mtp)) if not module.scheme
             for name in module.asked]  # fmt: skip
    checkpoint.quantization["config_groups"]["group_0"]["targets"] = ["Linear"]
    checkpoint.quantization["ignore"] = [*dict.fromkeys(names), "re:^visual\\."]
    return checkpoint


def modelopt(model: str, scheme: str = "NVFP4", **changes: Any) -> Checkpoint:
    """A modelopt export in one of its formats: MTP block left in BF16 and excluded."""
    checkpoint = ours(model, scheme, **changes)
    if scheme == "NVFP4":
        checkpoint.rename(r"(.*)\.weight_packed", r"\1.weight")
        checkpoint.rename(r"(.*)\.weight_global_scale", r"\1.weight_scale_2")
        checkpoint.rename(r"(.*)\.input_global_scale", r"\1.input_scale")
        checkpoint.retype(r".*\.(weight_scale_2|input_scale)", shape=lambda *_: ())
    plan = planned(model, scheme, "bf16", **changes)
    plain = [str(module.name) for module in runtime_modules(plan) if not module.scheme]
    view = plan.view
    draft = [f"{view.runtime_stem('mtp', 0 if view.layout.mtp else view.num_layers)}*", "mtp.*", "mtp.fc"]
    backbone = [name for name in plain if not name.startswith("mtp.") and not name.startswith(draft[0][:-1])]
    checkpoint.config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": scheme, "ignore": [*backbone, *draft, "lm_head", "visual*"],
        "producer": {"name": "modelopt", "version": "0.41"},
    }  # fmt: skip
    return checkpoint


def mixed() -> Checkpoint:
    """modelopt MIXED_PRECISION: FP8 attention, everything else plain."""
    checkpoint = modelopt("glm-4.7", "FP8")
    plan = planned("glm-4.7", "FP8", "bf16")
    layers = {str(module.name): {"quant_algo": "FP8"} for module in runtime_modules(plan) if module.scheme}
    checkpoint.config["quantization_config"] = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": ["lm_head"],
    }  # fmt: skip
    return checkpoint


def published_flash() -> Checkpoint:
    """DeepSeek-V4-Flash as published with NVFP4 experts and FP8 attention, its regexes verbatim."""
    checkpoint = ours("dsv4-flash", "NVFP4")
    plan = ours("dsv4-flash", "FP8_BLOCK")
    for name in [*checkpoint.tensors]:
        if re.match(r"layers\.\d+\.(attn|ffn\.shared_experts)\.", name):
            del checkpoint.tensors[name]
    for name, spec in plan.tensors.items():
        if re.match(r"layers\.\d+\.attn\.", name):
            checkpoint.tensors[name] = spec
    for name, spec in ours("dsv4-flash", "bf16").tensors.items():
        if re.match(r"layers\.\d+\.ffn\.shared_experts\.", name):
            checkpoint.tensors[name] = spec
    checkpoint.config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "mixed-precision", "quantization_status": "compressed",
        "scale_fmt": "ue8m0",
        "config_groups": {
            "group_0": {
                "format": "float-quantized",
                "targets": ["re:.*\\.attn\\.(fused_wqa_wkv|compressor\\.fused_wkv_wgate|wq_b|wo_a|wo_b)$"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128],
                            "symmetric": True, "dynamic": False},
                "input_activations": {"dynamic": True, "group_size": 128, "num_bits": 8, "strategy": "group",
                                      "symmetric": True, "type": "float"},
            },
            "group_1": {
                "format": "nvfp4-pack-quantized", "targets": ["re:.*\\.ffn\\.experts\\.\\d+\\.(w1|w2|w3)$"],
                "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                            "symmetric": True},
                "input_activations": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
                                      "dynamic": "local"},
            },
        },
        "ignore": ["head", "embed", "re:.*norm.*", "re:.*\\.ffn\\.gate$", "re:.*mtp\\..*", "re:.*\\.layers\\.3\\..*"],
    }  # fmt: skip
    return checkpoint


def nvfp4_experts() -> Checkpoint:
    """DeepSeek-V4-Pro as published: native FP8 config, NVFP4 experts, MTP passed through as MXFP4."""
    checkpoint = released("dsv4-pro")
    for name in [*checkpoint.tensors]:
        if re.match(r"layers\.\d+\.ffn\.experts\.", name):
            n, k = checkpoint.tensors[name][1]
            stem = name.rpartition(".")[0]
            if name.endswith(".weight"):
                checkpoint.tensors[name] = ("U8", (n, k))
                checkpoint.tensors[f"{stem}.weight_scale"] = ("F8_E4M3", (n, 2 * k // 16))
                checkpoint.tensors[f"{stem}.weight_scale_2"] = ("F32", (1,))
                checkpoint.tensors[f"{stem}.input_scale"] = ("F32", (1,))
            else:
                del checkpoint.tensors[name]
    checkpoint.quantization.update(moe_quant_algo="NVFP4", ignore=["mtp.*"])
    return checkpoint


def red_hat() -> Checkpoint:
    """Qwen3-Next under a hand-written recipe: delta nets left in BF16, everything by regexes from the start."""
    checkpoint = ours("qwen3-next-80b", "FP8_DYNAMIC")
    plain = released("qwen3-next-80b").tensors
    for name in [*checkpoint.tensors]:
        if ".linear_attn." in name and name not in plain:
            del checkpoint.tensors[name]
    checkpoint.tensors.update({name: spec for name, spec in plain.items() if ".linear_attn." in name})
    checkpoint.quantization["config_groups"]["group_0"]["targets"] = ["Linear"]
    checkpoint.quantization["ignore"] = [
        "lm_head", "re:.*mlp.gate$", "re:.*mlp.shared_expert_gate$", "re:.*linear_attn.*", "re:mtp.*", "re:.*visual.*",
    ]  # fmt: skip
    return checkpoint


def qwen_fp8() -> Checkpoint:
    """Qwen3.5 as its makers publish it in FP8: blocks, MTP layers too, exceptions in names on disk."""
    checkpoint = ours("qwen3.5-27b", "FP8_BLOCK", "FP8_BLOCK")
    checkpoint.rename(r"(.*)\.weight_scale", r"\1.weight_scale_inv")
    names = [name for module in runtime_modules(planned("qwen3.5-27b", "FP8_BLOCK", "FP8_BLOCK")) if not module.scheme
             for name in module.asked if name.startswith(("model.", "mtp.", "lm_head"))]  # fmt: skip
    checkpoint.config["quantization_config"] = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        "modules_to_not_convert": [*names, "model.visual.blocks.0.attn.qkv", "model.visual.merger.linear_fc1"],
    }  # fmt: skip
    return checkpoint


def gptq() -> Checkpoint:
    """A GPTQ checkpoint whose MTP block is left alone, and said to be."""
    checkpoint = ours("glm-4.7", "W4A16")
    checkpoint.rename(r"(.*)\.weight_packed", r"\1.qweight")
    checkpoint.rename(r"(.*)\.weight_scale", r"\1.scales")
    checkpoint.rename(r"(.*)\.weight_shape", r"\1.g_idx")
    checkpoint.config["quantization_config"] = {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {r"-:^model\.layers\.3\.": {}},
    }  # fmt: skip
    return checkpoint


def native_bf16_mtp() -> Checkpoint:
    """DeepSeek-V3 in its own FP8, MTP block dequantized and listed whole name by whole name."""
    checkpoint = released("deepseek-r1")
    stem = "model.layers.3."
    scaled = [n.rpartition(".")[0] for n in checkpoint.take(r"model\.layers\.3\..*weight_scale_inv")]
    for module in scaled:
        checkpoint.tensors[f"{module}.weight"] = ("BF16", checkpoint.tensors[f"{module}.weight"][1])
    attention = ["fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "o_proj"]
    checkpoint.quantization["ignored_layers"] = [
        *(f"{stem}self_attn.{name}" for name in attention), f"{stem}mlp.shared_experts.gate_up_proj",
        f"{stem}mlp.shared_experts.down_proj", f"{stem}mlp.experts",
    ]  # fmt: skip
    return checkpoint


GOOD: dict[str, Callable[[], Checkpoint]] = {
    **{f"released {model}": (lambda model=model: released(model)) for model in checkpoints.MODELS},
    "dsv4 bf16": lambda: ours("dsv4-flash", "NVFP4"),
    "dsv4 block": lambda: ours("dsv4-flash", "FP8_BLOCK", "source"),
    "dsv4 published": published_flash,
    "dsv4 nvfp4 experts": nvfp4_experts,
    "v3 native bf16 mtp": native_bf16_mtp,
    "v3 nvfp4": lambda: ours("deepseek-r1", "NVFP4"),
    "v3 block": lambda: ours("deepseek-r1", "FP8_BLOCK", "FP8_BLOCK"),
    "v3 modelopt": lambda: modelopt("deepseek-r1"),
    "glm w4a16": lambda: ours("glm-4.7", "W4A16", "W4A16"),
    "glm fp8": lambda: llmcompressor("glm-4.7", "FP8_DYNAMIC"),
    "glm fp8 static": lambda: ours("glm-4.7", "FP8", "FP8"),
    "glm nvfp4": lambda: ours("glm-4.7", "NVFP4", "NVFP4A16"),
    "glm modelopt": lambda: modelopt("glm-4.7", num_hidden_layers=12),
    "glm mixed": mixed,
    "glm-5 nvfp4": lambda: ours("glm-5", "NVFP4"),
    "lite fp8": lambda: llmcompressor("glm-4.7-flash", "FP8_DYNAMIC"),
    "next nvfp4": lambda: llmcompressor("qwen3-next-80b", "NVFP4"),
    "next fp8": lambda: ours("qwen3-next-80b", "FP8_DYNAMIC", "FP8_DYNAMIC"),
    "next red hat": red_hat,
    "next modelopt fp8": lambda: modelopt("qwen3-next-80b", "FP8"),
    "qwen vl native fp8": qwen_fp8,
    "qwen vl fp8": lambda: llmcompressor("qwen3.5-27b", "FP8_DYNAMIC"),
    "qwen vl modelopt": lambda: modelopt("qwen3.5-27b"),
    "qwen vl moe nvfp4": lambda: llmcompressor("qwen3.5-397b", "NVFP4"),
    "qwen text int8": lambda: llmcompressor("qwen3.5-text", "W8A8"),
    "mimo w4a16": lambda: ours("mimo-7b", "W4A16"),
    "mimo fp8": lambda: llmcompressor("mimo-7b", "FP8_DYNAMIC"),
}


# --- how they break -------------------------------------------------------------------------------------------------


def both(*changes: Change) -> Change:
    return lambda c: [change(c) for change in changes]


def lose(pattern: str) -> Change:
    return lambda c: [*c.take(pattern)]


def setting(key: str, value: Any) -> Change:
    """Set a key of config.json, or of its text_config if it has one; None removes it."""

    def change(c: Checkpoint) -> None:
        holder = c.config if key in c.config else c.config.get("text_config", c.config)
        holder.pop(key, None)
        if value is not None:
            holder[key] = value

    return change


def ignoring(*entries: str, without: str = r"$^") -> Change:
    """Replace the ignore entries that match `without` by `entries`."""

    def change(c: Checkpoint) -> None:
        kept = [entry for entry in c.quantization["ignore"] if not re.search(without, entry)]
        assert len(kept) < len(c.quantization["ignore"]) or entries
        c.quantization["ignore"] = [*kept, *entries]

    return change


def pack(module: str, scheme: str) -> Change:
    """Store modules in a scheme's form although nothing says so."""

    def change(c: Checkpoint) -> None:
        for name, (_, shape) in c.take(rf"{module}\.weight").items():
            for spec in SCHEMES[scheme].tensors(*shape):
                c.tensors[f"{name.removesuffix('.weight')}.{spec.suffix}"] = (spec.dtype, spec.shape)

    return change


def adding(name: str, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> Change:
    return lambda c: c.tensors.update({name: (dtype, shape)})


def renaming(pattern: str, replacement: str) -> Change:
    return lambda c: c.rename(pattern, replacement)


def retyping(pattern: str, dtype: str | None = None, shape: Shape | None = None) -> Change:
    return lambda c: c.retype(pattern, dtype, shape)


def groups(change: Callable[[dict[str, Any]], None]) -> Change:
    return lambda c: [change(group) for group in c.quantization["config_groups"].values()]


def move_mtp_out(c: Checkpoint) -> None:
    c.elsewhere = c.take(r"mtp\..*")


def quantization(**entries: Any) -> Change:
    return lambda c: c.config.update(quantization_config=entries)


def hf_quant_config(**changes: Any) -> Change:
    def change(c: Checkpoint) -> None:
        said = {"quant_algo": c.quantization["quant_algo"], "exclude_modules": c.quantization["ignore"]}
        c.json_files["hf_quant_config.json"] = {"quantization": said | changes}

    return change


def edit_index(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda c: setattr(c, "index", change)


def truncate(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    with open(path, "rb+") as file:
        file.truncate(path.stat().st_size - 10)


_FP8_NOT_Z = r"linear_attn\.in_proj_(qkvz|z)$"
BROKEN: tuple[Case, ...] = (
    # A. dropped
    Case("F1 dropped, count kept", "glm-5 nvfp4", lose(r"model\.layers\.3\..*"), "mtp-missing", "model.layers.3.",
         says="weights missing from checkpoint"),
    Case("F3 dropped in silence", "next nvfp4", lose(r"mtp\..*"), "mtp-missing", "mtp.layers.0.",
         says="without a word"),
    Case("F5 only the glue exported", "next nvfp4", lose(r"mtp\.layers\..*"), "mtp-missing", "mtp.layers.0."),
    Case("F4 in a file without index", "next nvfp4", move_mtp_out, "unindexed", "mtp."),
    Case("F9 count removed", "mimo fp8", setting("num_nextn_predict_layers", None), "mtp-not-promised",
         "num_nextn_predict_layers", says="ZeroDivisionError"),
    Case("M7 count zero", "glm fp8", setting("num_nextn_predict_layers", 0), "mtp-not-promised",
         "num_nextn_predict_layers", says="ZeroDivisionError"),
    Case("M7 count removed in V4", "dsv4 bf16", setting("num_nextn_predict_layers", None), "mtp-not-promised",
         "num_nextn_predict_layers", says="AttributeError"),
    Case("F10 vision-language, stripped", "qwen vl fp8", lose(r"mtp\..*"), "mtp-missing", "mtp.layers.0."),
    Case("R1 neither promised nor there", "glm fp8",
         both(lose(r"model\.layers\.3\..*"), setting("num_nextn_predict_layers", 0)),
         "mtp-missing", "num_nextn_predict_layers"),
    Case("M9 one layer too many", "glm fp8", setting("num_hidden_layers", 2), "mtp-not-promised", "model.layers.3."),
    Case("F2 norm lost", "glm fp8", lose(r"model\.layers\.3\.hnorm\.weight"), "mtp-incomplete", "model.layers.3.hnorm"),
    Case("M1 eh_proj lost", "v3 nvfp4", lose(r"model\.layers\.3\.eh_proj\.weight"), "mtp-incomplete",
         "model.layers.3.eh_proj"),
    Case("F8 o_proj of the draft lost", "next nvfp4", lose(r"mtp\.layers\.0\.self_attn\.o_proj\.weight"),
         "mtp-incomplete", "mtp.layers.0.self_attn.o_proj"),
    Case("F2 bias of the draft lost", "mimo w4a16", lose(r"model\.mtp_layers\.0\.self_attn\.k_proj\.bias"),
         "mtp-incomplete", "model.mtp_layers.0.self_attn.k_proj.bias"),
    Case("F2 correction bias of the draft lost", "glm fp8",
         lose(r"model\.layers\.3\.mlp\.gate\.e_score_correction_bias"),
         "mtp-incomplete", "model.layers.3.mlp.gate.e_score_correction_bias"),
    Case("E7 hyper-connection of the draft lost", "dsv4 bf16", lose(r"mtp\.0\.hc_head_fn"), "mtp-incomplete",
         "mtp.0.hc_head_fn"),
    Case("E8 decoder layer lost", "glm fp8", lose(r"model\.layers\.1\..*"), "layer-missing", "model.layers.1."),
    Case("M1 norm of a decoder layer lost", "glm fp8", lose(r"model\.layers\.1\.self_attn\.q_norm\.weight"),
         "layer-incomplete", "model.layers.1.self_attn.q_norm"),
    Case("E2 experts of one rank only", "glm nvfp4", lose(r"model\.layers\.1\.mlp\.experts\.[23]\..*"), "experts",
         "model.layers.1.mlp.experts.2"),
    Case("E2 one expert of the draft", "glm fp8", lose(r"model\.layers\.3\.mlp\.experts\.2\.up_proj\.weight"),
         "experts",
         "model.layers.3.mlp.experts.2.up_proj"),
    # B. plain, built quantized
    Case("F11 exclude misses mtp.fc", "next modelopt fp8", ignoring("mtp.layers.0*", without=r"^mtp"), "form",
         "mtp.fc.weight", says="in silence"),
    Case("F13 target Linear takes mtp.fc", "qwen vl fp8", ignoring(without=r"^mtp\.fc$"), "form", "mtp.fc.weight"),
    Case("F14 experts of the draft not ignored", "qwen vl moe nvfp4", ignoring(without=r"mtp\..*\.experts"), "form",
         "mtp.layers.0.mlp.experts.0.", says="no module or parameter named"),
    Case("F14 ignore names the fused experts", "next nvfp4",
         ignoring("mtp.layers.0.mlp.experts", without=r"mtp\..*\.experts"), "form", "mtp.layers.0.mlp.experts.0."),
    Case("F17 names of another space", "lite fp8", ignoring(r"re:.*mtp_block.*", without=r"^model\.layers\.3\."),
         "form", "model.layers.3.", says="in silence"),
    Case("F18 V4 draft inherits the main scheme", "dsv4 published",
         both(ignoring(without=r"layers\\\.3"), groups(lambda g: g.update(targets=["Linear"]))),
         "form", "mtp.0."),
    Case("H1 ignore by name on disk", "dsv4 published", ignoring(without=r"layers\\\.3"),
         "entry-unmatched", "re:.*mtp\\..*",
         severity="warning"),
    Case("H1 ignore by name on disk, seen by its effect", "dsv4 published", ignoring(without=r"layers\\\.3"), "form",
         "mtp.0."),
    Case("G6 mimo by name on disk", "mimo fp8", ignoring(r"re:^model\.mtp_layers\.", without=r"layers"), "form",
         "model.mtp_layers.0.", says="in silence"),
    Case("G6 mimo by name on disk, packed", "mimo w4a16",
         both(groups(lambda g: g.update(targets=["Linear"])),
              ignoring(r"re:^model\.mtp_layers\.", without=r"layers")),
         "form", "model.mtp_layers.0.", says="raises"),
    Case("M4 native FP8, plain draft not ignored", "v3 native bf16 mtp",
         lambda c: c.quantization.pop("ignored_layers"), "form", "model.layers.3.", says="in silence"),
    Case("F20 quark without exclude", "glm fp8", quantization(quant_method="quark", exclude=["lm_head"]), "dialect",
         "model.layers.3."),
    Case("F15 GPTQ without exception", "glm w4a16",
         both(lose(r"model\.layers\.3\..*(packed|scale|shape)"), quantization(quant_method="gptq", bits=4),
              lambda c: c.tensors.update({n: s for n, s in released("glm-4.7").tensors.items() if ".layers.3." in n})),
         "dialect", "model.layers.3."),
    Case("F38 placeholder head quantized", "v3 modelopt",
         ignoring("model.layers.3.self_attn*", "model.layers.3.mlp*", "model.layers.3.shared_head.head",
                  without=r"^model\.layers\.3\.\*$"),
         "draft-head", "model.layers.3.head", says="still NaN"),
    Case("F38 head of a Qwen3.5 draft quantized", "qwen vl modelopt",
         ignoring("language_model.lm_head", without=r"lm_head"), "draft-head", "lm_head"),
    # C. quantized, built plain or in another form
    Case("F35 packed although ignored", "next nvfp4", pack(r"mtp\.layers\.0\.self_attn\.o_proj", "NVFP4"), "form",
         "mtp.layers.0.self_attn.o_proj.weight_packed", says="builds mtp.layers.0.self_attn.o_proj plain"),
    Case("F28 experts quantized, everything ignored", "next fp8", ignoring(r"re:^mtp\."), "form", "mtp.layers.0."),
    Case("F25 missing from quantized_layers", "glm mixed",
         lambda c: c.quantization["quantized_layers"].pop("model.layers.1.self_attn.o_proj"), "form",
         "model.layers.1.self_attn.o_proj.weight"),
    Case("F29 head packed, read as plain", "glm nvfp4", pack("lm_head", "NVFP4"), "form", "lm_head.weight_packed"),
    Case("F34 half of a fused projection ignored", "qwen vl fp8",
         ignoring("language_model.model.layers.0.linear_attn.in_proj_qkv"), "config-group",
         "language_model.model.layers.0.linear_attn.in_proj_qkv", says="different quantization schemes"),
    Case("F27 q_proj ignored, k_proj and v_proj not", "next fp8", ignoring("mtp.layers.0.self_attn.q_proj"),
         "config-group", "mtp.layers.0.self_attn.q_proj", says="different quantization schemes"),
    Case("F27 the same under modelopt", "glm modelopt", ignoring("model.layers.2.self_attn.q_proj"), "config-group",
         "model.layers.2.self_attn.q_proj", says="some but not all shards"),
    Case("G1 targets in other names of the experts", "dsv4 published",
         lambda c: c.quantization["config_groups"]["group_1"].update(
             targets=[r"re:.*\.experts\.\d+\.(gate|up|down)_proj$"]),
         "form", "layers.0.ffn.experts.0.w1.weight_packed", says="no target matches"),
    Case("G1 the target that matches nothing", "dsv4 published",
         lambda c: c.quantization["config_groups"]["group_1"].update(targets=[r"re:.*\.experts\.\d+\.gate$"]),
         "entry-unmatched", r"re:.*\.experts\.\d+\.gate$", severity="warning"),
    Case("G2 target without the fused name", "dsv4 published",
         lambda c: c.quantization["config_groups"]["group_0"].update(targets=[r"re:.*\.attn\.(wq_a|wq_b|wo_a|wo_b)$"]),
         "form", "layers.0.attn.wkv.weight"),
    Case("R2 modelopt substring takes layers 10 and 11", "glm modelopt", ignoring("model.layers.1"), "form",
         "model.layers.1.", says="by the entry 'model.layers.1'"),
    Case("R2 no quantization config at all", "glm nvfp4", lambda c: c.config.pop("quantization_config"), "form",
         "model.layers.0.", says="no quantization_config"),
    Case("R2 expert projections in two schemes", "glm w4a16",
         ignoring(r"re:^model\.layers\.3\.mlp\.experts\.\d+\.down_proj"), "config-group", "re:^model"),
    Case("M1 scale of one shard lost", "glm fp8", lose(r"model\.layers\.1\.self_attn\.k_proj\.weight_scale"),
         "fused-uniform", "model.layers.1.self_attn.k_proj.weight"),
    Case("R3 one expert left plain", "glm nvfp4",
         both(lose(r"model\.layers\.1\.mlp\.experts\.3\.up_proj\..*"),
              adding("model.layers.1.mlp.experts.3.up_proj.weight", "BF16", (128, 256))),
         "fused-uniform", "model.layers.1.mlp.experts.3.up_proj.weight"),
    Case("F8 global scale of one shard lost", "glm nvfp4",
         lose(r"model\.layers\.1\.self_attn\.v_proj\.weight_global_scale"), "fused-uniform",
         "model.layers.1.self_attn.v_proj"),
    Case("M1 scale of a lone module lost", "glm fp8", lose(r"model\.layers\.1\.self_attn\.o_proj\.weight_scale"),
         "form",
         "model.layers.1.self_attn.o_proj.weight_scale", says="uninitialised in silence"),
    Case("Fp7 input scales lost", "glm modelopt", lose(r"model\.layers\.2\.self_attn\.o_proj\.input_scale"), "form",
         "model.layers.2.self_attn.o_proj.input_scale"),
    # D. glue
    Case("F42 eh_proj in FP8, scale dropped", "glm fp8", pack(r"model\.layers\.3\.eh_proj", "FP8_DYNAMIC"), "glue",
         "model.layers.3.eh_proj.weight", says="without a word"),
    Case("H7 eh_proj packed", "v3 nvfp4", pack(r"model\.layers\.3\.eh_proj", "NVFP4A16"), "glue",
         "model.layers.3.eh_proj.weight_packed", says="KeyError"),
    Case("H7 input_proj of MiMo packed", "mimo w4a16", pack(r"model\.mtp_layers\.0\.input_proj", "W4A16"), "glue",
         "model.mtp_layers.0.input_proj.weight_packed", says="no module or parameter named"),
    Case("G5 compressor quantized", "dsv4 published", pack(r"layers\.1\.attn\.compressor\.wkv", "FP8_BLOCK"), "glue",
         "layers.1.attn.compressor.wkv.weight"),
    Case("R4 router quantized", "glm fp8", pack(r"model\.layers\.1\.mlp\.gate", "FP8_DYNAMIC"), "glue",
         "model.layers.1.mlp.gate.weight"),
    Case("F12 mtp.fc packed under modelopt NVFP4", "qwen vl modelopt",
         lambda c: c.tensors.update({"mtp.fc.weight": ("U8", (256, 256)), "mtp.fc.weight_scale": ("F8_E4M3", (256, 32)),
                                     "mtp.fc.weight_scale_2": ("F32", ()), "mtp.fc.input_scale": ("F32", ())}),
         "form", "mtp.fc.weight", says="without quantization"),
    # E. names
    Case("F37 vision-language prefix", "qwen vl fp8", renaming(r"(mtp\..*)", r"language_model.\1"), "mtp-prefix",
         "language_model.mtp."),
    Case("F32 KV scales in the draft", "glm fp8", adding("model.layers.3.self_attn.k_proj.k_scale"), "kv-scales",
         "model.layers.3.self_attn.k_proj.k_scale"),
    Case("E7 transformers' names in the draft", "dsv4 bf16", renaming(r"mtp\.0\.hc_attn_base", "mtp.0.attn_hc.base"),
         "unknown-tensor", "mtp.0.attn_hc.base"),
    Case("E9 copies under another name", "dsv4 bf16", renaming(r"mtp\.0\.emb\.tok_emb\.weight", "mtp.0.embed.weight"),
         "unknown-tensor", "mtp.0.embed.weight"),
    Case("F7 tensors of another model", "glm fp8", adding("vision_model.encoder.weight", "BF16", (4, 4)),
         "unknown-tensor", "vision_model.encoder.weight", severity="warning"),
    Case("E10 copies missing", "dsv4 bf16", lose(r"mtp\.0\.(emb\.tok_emb|head)\.weight"), "alias", "mtp.0.emb.tok_emb",
         severity="warning", says="0 %"),
    Case("F24 bare .scale under compressed-tensors", "v3 block",
         renaming(r"(model\.layers\.3\.self_attn\.o_proj)\.weight_scale", r"\1.scale"), "form",
         "model.layers.3.self_attn.o_proj.scale"),
    Case("Fp5 _inv under compressed-tensors", "v3 block", renaming(r"(.*)\.weight_scale", r"\1.weight_scale_inv"),
         "form",
         ".weight_scale_inv", says="weight_scale_inv has no place"),
    Case("Fp5 no _inv under fp8", "released deepseek-r1", renaming(r"(.*)\.weight_scale_inv", r"\1.weight_scale"),
         "form",
         ".weight_scale", says="weight_scale has no place"),
    Case("R7 scale without weight", "glm fp8", lose(r"model\.layers\.3\.eh_proj\.weight"), "mtp-incomplete",
         "model.layers.3.eh_proj"),
    Case("R7 orphan scale", "glm fp8", adding("model.layers.3.mlp.shared_experts.w9.weight_scale"), "unknown-tensor",
         "model.layers.3.mlp.shared_experts.w9.weight_scale"),
    # F. scales and shapes
    Case("Fp1 global scale with two values", "glm nvfp4",
         retyping(r"model\.layers\.1\.self_attn\.o_proj\.weight_global_scale", shape=lambda *_: (2,)), "form",
         "model.layers.1.self_attn.o_proj.weight_global_scale"),
    Case("Fp2 block scales in BF16", "v3 block", retyping(r"model\.layers\.\d\..*\.weight_scale", "BF16"),
         "scale-dtype",
         ".weight_scale", severity="warning", says="DeepGEMM"),
    Case("M3 FP8 stored as bytes", "glm fp8", retyping(r"model\.layers\.1\.self_attn\.o_proj\.weight", "U8"), "form",
         "model.layers.1.self_attn.o_proj.weight", says="as numbers"),
    Case("M3 scales stored as bytes", "glm nvfp4", retyping(r"model\.layers\.1\.mlp\.experts\..*\.weight_scale", "U8"),
         "form", "model.layers.1.mlp.experts.0.", says="as numbers"),
    Case("M2 expert packed too narrow", "glm nvfp4",
         retyping(r"model\.layers\.1\.mlp\.experts\.2\.down_proj\.weight_packed", shape=lambda n, k: (n, k // 2)),
         "shapes", "model.layers.1.mlp.experts.2.down_proj.weight_packed", says="in silence"),
    Case("R2 eight bits, said to be four", "glm w4a16",
         retyping(r"model\.layers\.3\.self_attn\.o_proj\.weight_packed", shape=lambda n, k: (n, 2 * k)), "form",
         "model.layers.3.self_attn.o_proj.weight_scale"),
    Case("R15 width no multiple of the group", "glm w4a16",
         lambda c: c.tensors.update({"model.layers.3.self_attn.o_proj.weight_packed": ("I32", (256, 25)),
                                     "model.layers.3.self_attn.o_proj.weight_scale": ("BF16", (256, 1))}),
         "form", "model.layers.3.self_attn.o_proj.weight_scale", says="no multiple of the group"),
    Case("R15 part blocks inside a fused module", "v3 block",
         lambda c: c.tensors.update({"model.layers.3.self_attn.q_a_proj.weight": ("F8_E4M3", (200, 256)),
                                     "model.layers.3.self_attn.q_a_proj.weight_scale": ("F32", (2, 2))}),
         "shapes", "model.layers.3.self_attn.q_a_proj.weight", says="validate_fp8_block_shape"),
    # G. JSON files
    Case("M10 FP8 blocks without input_activations", "v3 block", groups(lambda g: g.update(input_activations=None)),
         "config-group", "re:^", says="is_static_input_scheme"),
    Case("Fp3 FP8 experts without input_activations", "glm fp8", groups(lambda g: g.update(input_activations=None)),
         "config-group", "Linear", says="Unsupported FusedMoe"),
    Case("Fp4 scale_fmt lost", "dsv4 bf16", lambda c: c.quantization.pop("scale_fmt"), "extras", "scale_fmt",
         severity="warning"),
    Case("E5 layer_types counts the MTP layer", "qwen vl fp8", setting("layer_types", ["full_attention"] * 5), "config",
         "layer_types"),
    Case("E6 compress_ratios lost", "dsv4 bf16", setting("compress_ratios", None), "config", "compress_ratios"),
    Case("E6 num_hidden_layers lost", "glm fp8", setting("num_hidden_layers", None), "config", "config.json"),
    Case("R5 two configs, two algorithms", "glm modelopt", hf_quant_config(quant_algo="FP8"), "two-configs",
         "quant_algo"),
    Case("R5 two configs, two lists", "glm modelopt", hf_quant_config(exclude_modules=["lm_head"]), "two-configs",
         "model.", severity="warning"),
    Case("R6 total_size of another checkpoint", "glm fp8",
         edit_index(lambda index: index["metadata"].update(total_size=1)), "index-size", "total_size",
         severity="warning"),
    Case("M8 index names a missing file", "glm fp8",
         edit_index(lambda index: index["weight_map"].update({"model.norm.weight": "gone.safetensors"})), "files",
         INDEX, says="gone.safetensors"),
    Case("M8 index names a missing tensor", "glm fp8",
         edit_index(lambda index: index["weight_map"].update({"model.extra.weight": "model-1.safetensors"})), "files",
         "model-1.safetensors", says="model.extra.weight"),
    Case("R6 shard cut short", "glm fp8", lambda c: setattr(c, "after", truncate), "files", "model-2.safetensors"),
    Case("R8 a family without a table", "glm fp8", setting("model_type", "step3p5"), "family", "config.json",
         says="step3p5"),
)  # fmt: skip
