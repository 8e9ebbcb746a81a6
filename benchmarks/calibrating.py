"""Calibrated runs against plain llm-compressor: the same recipe, the same tokens, each side a
process of its own.

In: nothing. GLM-4.7's layout with 16 and with 128 experts. Out: figures (figures.py). Each side has
one core and is timed from the start of its process to a finished checkpoint on disk: `keepmtp
quantize`, and `oneshot` in its sequential pipeline with `save_pretrained`. keepmtp's time includes
what llm-compressor leaves out: held-out perplexity and acceptance, the static check, and an MTP
block in the output.

Easy to get wrong: wall time on a shared machine. Times are of the processor, and the least of a few
runs.
"""

import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml
from _helpers import ROOT
from figures import Figure, output_of, run, seconds_of_children
from keepmtp.recipes.find import find_recipe
from releases import source_layout, write_checkpoint

REPEATS = 3
SHIPPED = ROOT / "models" / "tiny-glm4-moe"
# Of the peer's processor time, end to end. On a quiet machine NVFP4 takes 0.54 to 0.66 times. GPTQ takes
# 0.78 to 0.90 times: most of it is the loop over columns, the library's own on both sides. Held-out
# text costs keepmtp what the peer does not do.
MOST_TIME = {"nvfp4": 0.8, "w4a16-gptq": 1.0}
# GLM-4.7's layout, narrow: models that take longer than an import, with few experts and with as
# many as real ones.
LAYOUT = {
    "first_k_dense_replace": 1,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_experts_per_tok": 4,
    "vocab_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
WIDTHS = {16: {"moe_intermediate_size": 256}, 128: {"moe_intermediate_size": 128}}
# Variant, experts, layers.
RUNS = (("nvfp4", 16, 12), ("nvfp4", 128, 4), ("w4a16-gptq", 16, 12))
# With --small.
SMALL = {"samples": 4, "held_out": 2, "batch_size": 2}
TINY = {"moe_intermediate_size": 64, "hidden_size": 128, "intermediate_size": 128}
SMALL_RUNS = (("nvfp4", 8, 2),)

# Each child ends by printing one JSON line. VmHWM, not ru_maxrss: a child starts with its
# parent's.
PEAK = """
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
"""
OURS = (
    """
import json, re, sys
from pathlib import Path
sys.argv[0] = "keepmtp"
from keepmtp.cli.main import app
"""
    + PEAK
    + """
app(standalone_mode=False)
print(json.dumps({"rss": peak()}))
"""
)
PEER = (
    """
import json, re, sys, time
from pathlib import Path
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from keepmtp.quantize.calibrate.data.data import calibration_data
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.find import find_recipe
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
"""
    + PEAK
    + """
torch.set_num_threads(1)
recipe_file, folder, out = sys.argv[1:]
started = time.process_time()
recipe, _ = find_recipe(recipe_file)
data = calibration_data(recipe.calibration, open_source(folder))
modifier = {"minmax": QuantizationModifier, "gptq": GPTQModifier}[recipe.calibration.algorithm]
modifier = modifier(
    targets="Linear", scheme=recipe.backbone["attention"], ignore=["lm_head", "re:.*mlp.gate$", "re:.*in_proj_[ab]$"]
)
class Processor:
    def save_pretrained(self, *_, **__):
        pass
# Without load_quantizable_moe, which needs torchvision: oneshot makes the experts linear by itself.
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
batches = [{"input_ids": part} for part in data.ids.split(recipe.calibration.batch_size)]
oneshot(model=model, dataset=DataLoader(batches, batch_size=None), recipe=[modifier], processor=Processor(),
        pipeline="sequential")
model.save_pretrained(out)
print(json.dumps({"rss": peak(), "seconds": time.process_time() - started}))
"""
)


def against_oneshot(folder: Path, *, small: bool) -> Iterator[Figure]:
    """Processor time and peak memory of both sides, interleaved, on models that take longer than an
    import.
    """
    # The same share of held-out text as in the recipes of large models.
    changes, runs, repeats = {"samples": 128, "held_out": 8}, RUNS, REPEATS
    if small:
        changes, runs, repeats = SMALL, SMALL_RUNS, 1
    for variant, experts, layers in runs:
        recipe = recipe_of(variant, **changes)
        layout = {"n_routed_experts": experts, "num_hidden_layers": layers}
        layout |= TINY if small else WIDTHS[experts]
        source = narrow(folder / f"source-{experts}-{layers}", layout)
        seconds, memory = {"ours": [], "peer": []}, {"ours": [], "peer": []}
        for _ in range(repeats):
            for side, run_side in (("ours", run_ours), ("peer", run_peer)):
                out = folder / f"{variant}-{side}"
                started = seconds_of_children()
                memory[side].append(run_side(recipe, source, out)["rss"] / 2**30)
                seconds[side].append(seconds_of_children() - started)
                shutil.rmtree(out)
        ours, peer = (min(seconds[side]) for side in ("ours", "peer"))
        what = f"{variant}, {experts} experts, {layers} layers"
        yield Figure(
            what=f"{what}: processor time end to end",
            measured=f"{ours:.1f} s against {peer:.1f} s, {ours / peer:.2f}x",
            expected=f"<= {MOST_TIME[variant]}x",
            met=ours <= MOST_TIME[variant] * peer,
        )
        ours, peer = (statistics.median(memory[side]) for side in ("ours", "peer"))
        yield Figure(
            what=f"{what}: peak memory",
            measured=f"{ours:.2f} GiB against {peer:.2f} GiB",
            expected="less",
            met=ours < peer,
        )


def recipe_of(variant: str, **calibration: int) -> dict:
    """The recipe of the shipped model, with so much text."""
    document = yaml.safe_load(find_recipe("tiny-glm4-moe", scheme=variant)[1])
    document["calibration"] |= calibration
    return document | {"default": False}


def narrow(folder: Path, changes: dict) -> Path:
    """GLM-4.7's layout with random weights and the shipped model's tokenizer, made once."""
    if not folder.is_dir():
        layout = LAYOUT | changes
        config, tensors = source_layout("glm-4.7", size="tiny", changes=layout)
        write_checkpoint(folder, config, tensors, data="random")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(SHIPPED / file, folder / file)
    return folder


def run_ours(recipe: dict, source: Path, out: Path) -> dict:
    """One `keepmtp quantize`; its peak memory."""
    file = _recipe_file(recipe, out)
    words = ["quantize", str(file), "--source", str(source), "--out", str(out)]
    return _json_of([sys.executable, "-c", OURS, *words])


def run_peer(recipe: dict, source: Path, out: Path) -> dict:
    """One `oneshot` with the preset of the recipe's scheme; its peak memory, and its processor time
    after the imports. It keeps no MTP block, and is not helped.
    """
    file = _recipe_file(recipe, out)
    return _json_of([sys.executable, "-c", PEER, str(file), str(source), str(out)])


def _recipe_file(recipe: dict, out: Path) -> Path:
    path = out.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path


def _json_of(words: list[str]) -> dict:
    """The last line of a child."""
    one_core = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    said = output_of(words, cwd=ROOT, env=os.environ | one_core)
    return json.loads(said.splitlines()[-1])


if __name__ == "__main__":
    run(__doc__, {"oneshot": against_oneshot})
