"""Calibrated runs against plain llm-compressor: the same recipe, the same tokens, each side a
process of its own.

In: nothing. The shipped model for figures of quality, GLM-4.7's layout with 16 and with 128 experts
for time and memory, and a layer so thin that only the host's work is left. Out: a table, or JSON
with --json; exit status 1 if a target is missed. Each side has one core and is timed from the start
of its process to a finished checkpoint on disk: `keepmtp quantize`, and `oneshot` in its sequential
pipeline with `save_pretrained`. keepmtp's time includes what llm- compressor leaves out: held-out
perplexity and acceptance, the static check, and an MTP block in the output.

Easy to get wrong: wall time on a shared machine. Times are of the processor, and the least of a few
runs.
"""

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
from releases import source_layout, write_checkpoint

ROOT = Path(__file__).parent.parent
REPEATS = 3
# AWQ is not among them: llm-compressor 0.14.0.1 finds no mapping for a GLM whose first layer is
# dense, and stops.
VARIANTS = ("nvfp4", "fp8", "w4a16-gptq")
TIMED = {"nvfp4": (16, 128), "w4a16-gptq": (16,)}
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
LAYOUTS = {
    16: LAYOUT | {"num_hidden_layers": 12, "n_routed_experts": 16, "moe_intermediate_size": 256},
    128: LAYOUT | {"num_hidden_layers": 4, "n_routed_experts": 128, "moe_intermediate_size": 128},
}
DEPTHS = (4, 24)  # layers of 16 experts, for peak memory
HOST_EXPERTS = (128, 512)  # routed experts of the thin layer

# Both children end by printing one JSON line. VmHWM, not ru_maxrss: a child starts with its
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
sys.stderr.write(json.dumps({"rss": peak()}) + "\\n")
"""
)
PEER = (
    """
import json, os, re, sys
from pathlib import Path
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from keepmtp.quantize.calibrate.data.data import calibration_data
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.find import read_recipe
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
"""
    + PEAK
    + """
recipe_file, folder, out = sys.argv[1:]
recipe = read_recipe(Path(recipe_file))
scheme = recipe.backbone["attention"]
data = calibration_data(recipe.calibration, open_source(folder))
size = recipe.calibration.batch_size
ignore = ["lm_head", "re:.*mlp.gate$", "re:.*in_proj_[ab]$"]
algorithm = recipe.calibration.algorithm
plain = QuantizationModifier(targets="Linear", scheme=scheme, ignore=ignore)
modifiers = {
    "minmax": [plain], "gptq": [GPTQModifier(targets="Linear", scheme=scheme, ignore=ignore)],
}[algorithm]
class Processor:
    def save_pretrained(self, *_, **__):
        pass
# Without load_quantizable_moe, which needs torchvision: oneshot makes the experts linear by itself.
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
batches = [{"input_ids": part} for part in data.ids.split(size)]
oneshot(model=model, dataset=DataLoader(batches, batch_size=None), recipe=modifiers, processor=Processor(),
        pipeline="sequential")
perplexity = None
if "PERPLEXITY" in os.environ:
    loss, count = 0.0, 0
    with torch.no_grad():
        for ids in data.held_out_ids.split(size):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            wanted = ids[:, 1:].flatten()
            loss += torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted, reduction="sum").item()
            count += ids[:, 1:].numel()
    perplexity = torch.tensor(loss / count).exp().item()
model.save_pretrained(out)
print(json.dumps({"rss": peak(), "perplexity": perplexity}))
"""
)
HOST = """
import json, sys, time
import torch
from torch import nn
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Glm4MoeConfig
from keepmtp.quantize.calibrate.model.binding import linear_experts
from keepmtp.quantize.calibrate.layers.layer import calibrate
from keepmtp.quantize.calibrate.layers.work import LayerWork
config = Glm4MoeConfig(num_hidden_layers=1, first_k_dense_replace=0, hidden_size=64, moe_intermediate_size=32,
                       n_routed_experts=int(sys.argv[1]), num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                       vocab_size=512, attn_implementation="eager")
class Processor:
    def save_pretrained(self, *_, **__):
        pass
def ours(batches):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.device("meta"):
        linear_experts(model)
    model.model.layers.to_empty(device="cpu")
    for parameter in model.model.layers.parameters():
        parameter.data.normal_(0, 0.02)
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear and "layers" in name]
    started = time.process_time()
    calibrate(model, batches, LayerWork(schemes=dict.fromkeys(names, "NVFP4"), algorithm="minmax"))
    return time.process_time() - started
def peer(batches):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.config._name_or_path = model.name_or_path = "models/tiny-glm4-moe"  # where oneshot looks for a config.json
    modifier = QuantizationModifier(targets="Linear", scheme="NVFP4", ignore=["lm_head", "re:.*mlp.gate$"])
    started = time.process_time()
    oneshot(model=model, dataset=DataLoader(batches, batch_size=None), recipe=[modifier], processor=Processor(),
            pipeline="sequential")
    return time.process_time() - started
def a_batch(run):
    batches = [{"input_ids": torch.randint(512, (1, 32))} for _ in range(18)]
    run(batches[:1])
    few, many = (min(run(batches[:count]) for _ in range(3)) for count in (2, 18))
    return (many - few) / 16
print(json.dumps({"ours": a_batch(ours), "peer": a_batch(peer)}))
"""

SEARCH = """
import json, sys, tempfile, time
from pathlib import Path
import torch
from keepmtp.checkpoints.source import open_source
from keepmtp.pipeline import plan_before_measuring
from keepmtp.quantize.run.ranks import Ranks
from keepmtp.quantize.calibrate.run import calibrate
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Recipe
torch.set_num_threads(1)
raw = find_recipe("tiny-docs.nvfp4-mtp-nvfp4")[0].model_dump()
raw["calibration"]["held_out"] = 16
words = {"candidates": ["NVFP4", "FP8_DYNAMIC", "bf16"]}
auto = {"backbone": "auto", "mtp": "auto", "budget": "4.75 bits", "backbone_auto": words}
def seconds(changes):
    recipe = Recipe.model_validate(raw | changes)
    plan = plan_before_measuring(recipe, open_source("models/tiny-docs"))
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        calibrate(plan, Path(folder), ranks=ALONE)
        return time.process_time() - started
ALONE = Ranks(rank=0, size=1, device=torch.device("cpu"))
seconds({})
runs = [(seconds({}), seconds(auto)) for _ in range(int(sys.argv[1]))]
print(json.dumps({"plain": min(run[0] for run in runs), "searched": min(run[1] for run in runs)}))
"""


def main() -> None:
    """Measure, print, and fail on a missed target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=VARIANTS, help="One variant instead of all.")
    arguments = parser.parse_args()
    variants = (arguments.only,) if arguments.only else VARIANTS
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for variant in variants for row in quality(variant, Path(folder))]
        rows += [
            row
            for variant in variants
            for experts in TIMED.get(variant, ())
            for row in speed(variant, experts, Path(folder))
        ]
        rows += [
            row for experts in HOST_EXPERTS if "nvfp4" in variants for row in host_time(experts)
        ]
        rows += [depths(Path(folder)), search_cost()] if "nvfp4" in variants else []
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        table = Table(title="keepmtp quantize against llm-compressor's oneshot")
        for column in ("what", "measured", "target", "met"):
            table.add_column(column)
        for row in rows:
            table.add_row(
                row["what"], row["measured"], row["target"], "yes" if row["met"] else "[red]NO[/]"
            )
        Console(width=140).print(table)
    sys.exit(not all(row["met"] for row in rows))


def quality(variant: str, folder: Path) -> list[dict]:
    """Held-out perplexity of both sides, and the acceptance that is kept, on the shipped model."""
    recipe, text = find_recipe("tiny-glm4-moe", scheme=variant)
    ours = run_ours(recipe, text, ROOT / "models" / "tiny-glm4-moe", folder / f"{variant}-shipped")
    peer = run_peer(
        recipe, text, ROOT / "models" / "tiny-glm4-moe", folder / f"{variant}-peer", perplexity=True
    )
    source, served = ours["rows"][:2]
    first = [row["acceptance"]["by_position"]["1"][0] for row in (source, served)]
    kept = first[1] / first[0]
    return [
        {
            "what": f"{variant}: held-out perplexity (source {source['perplexity']:.3f})",
            "measured": f"{served['perplexity']:.3f}, llm-compressor {peer['perplexity']:.3f}",
            "target": "within 1 %",
            "met": abs(served["perplexity"] / peer["perplexity"] - 1) <= 0.01,
        },
        {
            "what": f"{variant}: acceptance kept with a BF16 MTP block",
            "measured": f"{kept:.1%}",
            "target": ">= 97 %",
            "met": kept >= 0.97,
        },
    ]


def speed(variant: str, experts: int, folder: Path) -> list[dict]:
    """Processor time and peak memory of both sides, interleaved, on a model that takes longer than
    an import.
    """
    recipe, text = find_recipe("tiny-glm4-moe", scheme=variant)
    # The same share of held-out text as in the recipes of large models.
    text = text.replace("samples: 32", "samples: 128").replace("held_out: 16", "held_out: 8")
    source = folder / f"source-{experts}"
    if not source.is_dir():
        write_checkpoint(
            source, *source_layout("glm-4.7", size="tiny", changes=LAYOUTS[experts]), data="random"
        )
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "models" / "tiny-glm4-moe" / file, source / file)
    seconds, memory = {"ours": [], "peer": []}, {"ours": [], "peer": []}
    for _ in range(REPEATS):
        for side, run in (("ours", run_ours), ("peer", run_peer)):
            out = folder / f"{variant}-{side}"
            started = _processor_seconds()
            memory[side].append(run(recipe, text, source, out)["rss"])
            seconds[side].append(_processor_seconds() - started)
            shutil.rmtree(out)
    ours, peer = (min(seconds[side]) for side in ("ours", "peer"))
    ours_memory, peer_memory = (
        statistics.median(memory[side]) / 2**30 for side in ("ours", "peer")
    )
    return [
        {
            "what": f"{variant}, {experts} experts: time end to end",
            "measured": f"{ours:.1f} s against {peer:.1f} s, {ours / peer:.2f}x",
            "target": "<= 1x",
            "met": ours <= peer,
        },
        {
            "what": f"{variant}, {experts} experts: peak memory",
            "measured": f"{ours_memory:.2f} GiB against {peer_memory:.2f} GiB",
            "target": "lower",
            "met": ours_memory < peer_memory,
        },
    ]


def depths(folder: Path) -> dict:
    """Peak memory of both sides at two depths: ours holds one layer, whatever their number."""
    recipe, text = find_recipe("tiny-glm4-moe", scheme="nvfp4")
    gigabytes: dict[str, list[float]] = {"ours": [], "peer": []}
    for layers in DEPTHS:
        source = folder / f"source-{layers}-layers"
        changes = LAYOUTS[16] | {"num_hidden_layers": layers}
        layout = source_layout("glm-4.7", size="tiny", changes=changes)
        write_checkpoint(source, *layout, data="random")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "models" / "tiny-glm4-moe" / file, source / file)
        for side, run in (("ours", run_ours), ("peer", run_peer)):
            out = folder / f"{layers}-{side}"
            gigabytes[side].append(run(recipe, text, source, out)["rss"] / 2**30)
            shutil.rmtree(out)
    (small, large), (peer_small, peer_large) = gigabytes["ours"], gigabytes["peer"]
    return {
        "what": f"nvfp4: peak memory at {DEPTHS[0]} and at {DEPTHS[1]} layers",
        "measured": f"{small:.2f} and {large:.2f} GiB against {peer_small:.2f} and "
        f"{peer_large:.2f} GiB",
        "target": "grows less",
        "met": large - small < peer_large - peer_small,
    }


def host_time(experts: int) -> list[dict]:
    """What one more batch costs a core in one thin layer, where the arithmetic is next to
    nothing.
    """
    done = json.loads(_child([sys.executable, "-c", HOST, str(experts)]).stdout.splitlines()[-1])
    ours, peer = (done[side] * 1000 for side in ("ours", "peer"))
    return [
        {
            "what": f"nvfp4, {experts} experts: host time a batch and layer",
            "measured": f"{ours:.0f} ms against {peer:.0f} ms, {ours / peer:.2f}x",
            "target": "<= 0.4x",
            "met": ours <= 0.4 * peer,
        }
    ]


def search_cost() -> dict:
    """Calibration with a search under a budget against the same without one, both warm: no time of
    a start counts.
    """
    done = json.loads(_child([sys.executable, "-c", SEARCH, str(REPEATS)]).stdout.splitlines()[-1])
    return {
        "what": "tiny-docs: calibration with backbone: auto against a plain one",
        "measured": (
            f"{done['searched']:.1f} s against {done['plain']:.1f} s, "
            f"{done['searched'] / done['plain']:.2f}x"
        ),
        "target": "<= 2x",
        "met": done["searched"] <= 2 * done["plain"],
    }


def _processor_seconds() -> float:
    """Of all children so far: other work on the machine does not count, and threads that wait do
    not either.
    """
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_ours(recipe: Recipe, text: str, source: Path, out: Path) -> dict:
    """One `keepmtp quantize`; what it measured, and its peak memory."""
    file = _recipe_file(recipe, text, out)
    words = ["quantize", str(file), "--source", str(source), "--out", str(out)]
    done = _child([sys.executable, "-c", OURS, *words])
    measured = json.loads((out / "keepmtp.json").read_text())["calibration"]
    return measured | json.loads(done.stderr.splitlines()[-1])


def run_peer(
    recipe: Recipe, text: str, source: Path, out: Path, *, perplexity: bool = False
) -> dict:
    """One `oneshot` with the preset of the recipe's scheme; its JSON."""
    file = _recipe_file(recipe, text, out)
    done = _child(
        [sys.executable, "-c", PEER, str(file), str(source), str(out)],
        PERPLEXITY="1" if perplexity else "",
    )
    return json.loads(done.stdout.splitlines()[-1])


def _recipe_file(recipe: Recipe, text: str, out: Path) -> Path:
    document = yaml.safe_load(text) | {"default": False}
    path = out.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    assert recipe.calibration is not None
    return path


def _child(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = (
        os.environ
        | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        | {key: value for key, value in variables.items() if value}
    )
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(words[3:])}\n{re.sub(r'(?m)^.*it/s.*$', '', done.stderr)[-3000:]}")
    return done


if __name__ == "__main__":
    main()
