"""How long GLM-4.5-Air in NVFP4 takes on one H200, counted term by term, each with its source.

    python benchmarks/counted.py            prints the table, and measures the host's time for a module
    python benchmarks/counted.py --write    writes the table to docs/benchmarks.md

In: the release's headers at full size, over holes; 256 + 16 sequences of 2,048 tokens. Out: the table. Nothing of it
was run on a GPU: operations and bytes are counted (tests/quantize/test_estimate.py compares the operations with torch's
FlopCounterMode), the host's time is measured on thin layers with as many experts, and shares of a peak are assumed.
"""

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))
import torch
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.data.data import CalibrationData
from keepmtp.quantize.calibrate.layers.backbone import calibrate_backbone
from keepmtp.quantize.needs.cards import CARDS
from keepmtp.quantize.needs.estimate import Estimate, TimeTerm, estimate
from keepmtp.quantize.needs.memory import MAX_TOKENS, largest_batch_size
from keepmtp.quantize.plan.plan import Plan, make_plan
from keepmtp.recipes.find import find_recipe
from passes import ALONE
from releases import source_layout, write_checkpoint

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
MARKERS = "<!-- counted -->", "<!-- end of counted -->"
RECIPE, CARD = "glm-4.5-air.nvfp4-fp8", "H200"
THIN = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def air(folder: Path) -> Plan:
    """GLM-4.5-Air at its real size, from headers."""
    write_checkpoint(folder, *source_layout("glm-4.5-air", size="full"), num_shards=None)
    return make_plan(find_recipe(RECIPE)[0], open_source(folder))


def table(plan: Plan) -> str:
    """The terms with one sequence in a batch and with as many as `auto` takes."""
    card, calibration = CARDS[CARD], plan.recipe.calibration
    assert calibration is not None
    most = max(1, MAX_TOKENS // calibration.sequence_length)
    size = largest_batch_size(plan, int(0.9 * card.memory_bytes), at_most=most)
    by_one, by_many = estimate(plan, card), estimate(plan, card, batch_size=size)
    lines = [
        f"GLM-4.5-Air, NVFP4 experts, {calibration.samples} + {calibration.held_out} sequences of "
        f"{calibration.sequence_length:,} tokens, one {CARD}, counted: {_minutes(by_many)} with {size} sequences in a "
        f"batch, where {_rule(by_many)}; {_minutes(by_one)} with one, where {_rule(by_one)}. Within a station compute "
        "and memory follow each other, and the other terms go on meanwhile. The download is not counted.",
        "",
        f"| station | term | count | a second | rate from | s, batches of {size} | s, of 1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for many, one in zip(by_many.terms, by_one.terms, strict=True):
        lines.append(
            f"| {many.station} | {many.name} | {_count(many)} | {many.rate:.3g} | {many.source} | {many.seconds:.0f} | "
            f"{one.seconds:.0f} |"
        )
    return "\n".join(lines)


def with_table(page: str, made: str) -> str:
    """docs/benchmarks.md with this table between its markers."""
    start, end = map(re.escape, MARKERS)
    written, count = re.subn(f"(?s)({start}\n).*({end})", lambda found: f"{found[1]}\n{made}\n\n{found[2]}", page)
    assert count == 1, f"{PAGE.name} must have {MARKERS[0]} and {MARKERS[1]} once"
    return written


def host_seconds(num_experts: int) -> float:
    """Processor seconds for one module in one batch of a thin layer, statistics and states included."""
    with tempfile.TemporaryDirectory() as name:
        folder, changes = Path(name), THIN | {"n_routed_experts": num_experts}
        write_checkpoint(folder / "source", *source_layout("glm-4.5-air", size="full", changes=changes), data="random")
        few, many = (_pass_seconds(folder, samples) for samples in (4, 44))
        # Three matrices an expert and of the shared expert, four of attention, one router; and a dense layer before.
        return (many - few) / 40 / (3 * num_experts + 3 + 5 + 7)


def _pass_seconds(folder: Path, samples: int) -> float:
    recipe, _ = find_recipe(RECIPE)
    assert recipe.calibration is not None
    sizes = {"samples": samples, "held_out": 1, "sequence_length": 16, "batch_size": 1}
    recipe = recipe.model_copy(update={"calibration": recipe.calibration.model_copy(update=sizes)})
    plan = make_plan(recipe, open_source(folder / "source"))
    ids = torch.randint(3, 300, (samples + 1, 16), generator=torch.Generator().manual_seed(0))
    data = CalibrationData(ids=ids[:samples], held_out_ids=ids[samples:], provenance={"drawn": samples})
    started = time.process_time()
    calibrate_backbone(plan, data, folder / str(samples), device=ALONE.device, ranks=ALONE)
    return time.process_time() - started


def _minutes(found: Estimate) -> str:
    return f"{found.seconds / 60:.1f} minutes"


def _rule(found: Estimate) -> str:
    return f"{found.ruling.name} of the {found.ruling.station} rules"


def _count(term: TimeTerm) -> str:
    return f"{term.count:.3g} {term.unit}"


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = table(air(Path(folder)))
    if arguments.write:
        PAGE.write_text(with_table(PAGE.read_text(), made))
        return
    print(made)
    torch.set_num_threads(1)
    host_seconds(16)
    for num_experts in (128, 512):
        print(f"host, {num_experts} experts: {host_seconds(num_experts):.2g} s for one module in one batch")


if __name__ == "__main__":
    main()
