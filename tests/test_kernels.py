"""The kernels that `make docs PAGE=kernels` wrote down are those on the page, and those of the dry
load.
"""

import kernels
import pytest
from data_files import json_of
from keepmtp.recipes.errors import VLLMError
from keepmtp.validate.dryload.versions import had_vllms
from keepmtp.validate.facts.vllm_env import find_vllm
from pages import with_part

KERNELS = json_of(kernels.DATA)


def test_the_page_has_the_kernels_of_every_scheme(tmp_path):
    page, part = kernels.PAGE, kernels.written(KERNELS["kernels"])
    assert page.read_text() == with_part(page, part), "run `make docs PAGE=kernels`"
    assert [*KERNELS["kernels"]] == [*kernels.jobs(tmp_path)]


@pytest.mark.full
@pytest.mark.vllm
def test_the_dry_load_gives_the_kernels_that_are_written_down(tmp_path):
    try:
        (vllm,) = had_vllms([KERNELS["vllm"]], find_vllm())[0]
    except VLLMError as error:
        pytest.skip(f"the package index gives no wheel: {error}")
    assert kernels.kernels_of(vllm, tmp_path) == KERNELS["kernels"]
