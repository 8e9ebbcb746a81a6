"""What keepmtp says it can calibrate is what transformers' classes say of every release with a
recipe, today.
"""

import pytest
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.calibrate.model.skeleton import backbone_refusal
from keepmtp.quantize.calibrate.mtp.mtp_pass import cannot_run
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.families import SUPPORT_FILE
from keepmtp.recipes.find import find_recipe
from releases import source_layout, write_checkpoint
from support import PAGE, page, tried


@pytest.mark.full
def test_the_data_and_the_page_are_what_is_made_today(tmp_path):
    assert SUPPORT_FILE.read_text() == tried(tmp_path), "run `make docs`"
    assert PAGE.read_text() == page(), "run `make docs`"


def test_a_class_that_lacks_a_name_on_disk_is_named(tmp_path):
    config, tensors = source_layout("glm-4.5-air")
    write_checkpoint(tmp_path, config, tensors)
    plan = make_plan(find_recipe("glm-4.5-air")[0], open_source(tmp_path))
    assert backbone_refusal(plan) is None and cannot_run(plan) is None
    lacking = [
        tensor
        for tensor in plan.tensors
        if not tensor.name.endswith("layers.1.self_attn.o_proj.weight")
    ]
    broken = type(plan)(
        recipe=plan.recipe, source=plan.source, view=plan.view, tensors=tuple(lacking)
    )
    refusal = backbone_refusal(broken)
    assert refusal is not None and "self_attn.o_proj.weight" in str(refusal)
