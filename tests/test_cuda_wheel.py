"""The kernels that `make cuda-wheel` wrote down are those on the page, and those of the stubs."""

import cuda_wheel
import pytest
from keepmtp.recipes.errors import VLLMError
from keepmtp.recipes.runtimes.vllm import KERNELS
from keepmtp.validate.dryload.versions import had_vllms
from keepmtp.validate.facts.vllm_env import find_vllm


def test_the_page_has_the_kernels_of_every_scheme():
    page = cuda_wheel.PAGE.read_text()
    assert page == cuda_wheel.with_table(page, KERNELS["kernels"]), "run `make cuda-wheel`"
    assert [*KERNELS["kernels"]] == [scheme for _, scheme in cuda_wheel.OF_SCHEMES]


def test_what_differs_is_counted_and_named():
    sides = {}
    for side, verdict, kernel in (("stubs", "loads", "Marlin"), ("wheel", "1 faults", "Humming")):
        rows = [["draft", "mtp.fc", "Linear", "FP8", kernel, "ok", 1]]
        ours = ["glm-4.7", "FP8", {"verdict": "loads", "rows": rows}]
        modelopt = ["glm-4.7", "modelopt FP8", {"verdict": verdict, "rows": rows}]
        sides[side] = {"sm90": [ours, modelopt]}
    assert cuda_wheel.differences({**sides, "wheel": sides["stubs"]})[1] == 0
    page, count = cuda_wheel.differences(sides)
    assert count == 2 and page.startswith("2 cells, 1 verdicts differ; 2 kernel rows, 1 differ")
    assert "| sm90 | Linear | Marlin | Humming | 1 |" in page and "| loads | 1 faults |" in page


@pytest.mark.full
@pytest.mark.vllm
def test_the_stubs_give_the_kernels_of_the_wheel(tmp_path):
    try:
        (vllm,) = had_vllms([KERNELS["vllm"]], find_vllm())[0]
    except VLLMError as error:
        pytest.skip(f"the package index gives no wheel: {error}")
    jobs = cuda_wheel.made(tmp_path, cuda_wheel.OF_SCHEMES)
    side = {}
    for gpu in KERNELS["gpus"]:
        side[gpu] = cuda_wheel.load(vllm, gpu, jobs, tmp_path / f"{gpu}.json")
    assert cuda_wheel.kernels_of(side) == KERNELS["kernels"]
