"""A GPU that is full, or that fails, at each station: a sentence, and the same command goes on to
the same bytes.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gpu_runs import CPU, DATA, different, in_a_child, line, nvfp4_recipe
from keepmtp.quantize.calibrate.layers import backbone
from keepmtp.quantize.calibrate.model.skeleton import Skeleton
from keepmtp.quantize.calibrate.mtp import mtp_pass, mtp_policy
from keepmtp.quantize.run.ranks import Ranks, naming_lost_device
from keepmtp.quantize.write import writer
from keepmtp.recipes.errors import RecipeError
from keepmtp.recipes.find import find_recipe
from pretended_gpu import GPU, pretended_gpu
from releases import source_layout, write_checkpoint

# What must fit, in the sentence -> where the GPU is full: from this call of a function on.
FULL = {
    "the embedding": (Skeleton, "__init__", 1),
    "decoder layer 0 and a batch": (backbone, "_calibrate_layer", 1),
    "decoder layer 1 and a batch": (backbone, "_calibrate_layer", 2),
    "the head and a sequence": (mtp_pass, "target", 1),
    "the MTP block and a batch": (mtp_policy, "filled_blocks", 1),
    r"model\.\S+": (writer._Job, "run", 3),
}


@pytest.mark.full
def test_a_full_gpu_and_one_that_fails_are_sentences_and_nothing_is_lost(tmp_path):
    full, failed, changed = in_a_child(starved_runs, tmp_path)
    assert full.keys() == FULL.keys()
    for what, sentence in full.items():
        rule = (
            rf"{what} must fit gpu:0.*; got out of memory.*\. Free the device of other "
            rf"processes, or "
        )
        assert re.search(rule, sentence), (what, sentence)
    assert (
        "gpu:0 of rank 0 of 1" in failed and "got CUDA error: an uncorrectable ECC error" in failed
    )
    assert "the same command goes on where this run stopped" in failed
    assert changed == ()


def starved_runs(folder: Path) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """The sentences of a full GPU and of one that fails, and the files that then differ from the
    CPU's.
    """
    source = write_checkpoint(folder / "source", *source_layout("glm-4.7"), data="random")
    recipe = nvfp4_recipe(find_recipe("glm-4.7")[0], source)
    line(recipe, source, DATA, folder / "cpu", CPU)
    with pretended_gpu() as gpu:
        ranks = Ranks(rank=0, size=1, device=gpu.device)

        def run() -> str:
            try:
                with naming_lost_device(ranks):
                    line(recipe, source, DATA, folder / "gpu", gpu.device)
            except RecipeError as refusal:
                return str(refusal)
            finally:
                gpu.memory_bytes, gpu.failure = 80 * 2**30, None
            return ""

        full = {}
        for what, (owner, name, count) in FULL.items():
            with patch.object(owner, name, after(count, getattr(owner, name), lambda: fill(gpu))):
                full[what] = run()
        error = torch.AcceleratorError("CUDA error: an uncorrectable ECC error\nMore.")
        with patch.object(
            writer._Job, "run", after(5, writer._Job.run, lambda: setattr(gpu, "failure", error))
        ):
            failed = run()
        assert run() == ""
    return full, failed, different(folder)


def fill(gpu: GPU) -> None:
    gpu.memory_bytes = gpu.bytes_now


def after(
    count: int, real: Callable[..., Any], happens: Callable[[], object]
) -> Callable[..., Any]:
    """A function before whose call number `count` something happens."""
    calls = []

    def call(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) == count:
            happens()
        return real(*args, **options)

    return call
