"""The table of forms: what a scheme writes by it is what is read back by it."""

import pytest
import torch
from keepmtp.checkpoints.safetensors_file import Entry
from keepmtp.checkpoints.stored import stored_weights
from keepmtp.checkpoints.values import TORCH_DTYPES
from keepmtp.recipes.family import HFName
from keepmtp.recipes.forms import FORMS
from keepmtp.recipes.schemes import SCHEMES

MODULE = HFName("model.layers.0.mlp.down_proj")


@pytest.mark.parametrize("name", SCHEMES)
def test_what_a_scheme_writes_has_its_form(name):
    entries = []
    for spec in SCHEMES[name].tensors(256, 512):
        tensor = HFName(f"{MODULE}.{spec.suffix}")
        entry = Entry(
            name=tensor, file="a", dtype=spec.dtype, shape=spec.shape, start=0, num_bytes=0
        )
        entries.append(entry)
    weights, others = stored_weights(entries)
    assert not others
    assert weights[MODULE].form == SCHEMES[name].form
    assert weights[MODULE].shape == (256, 512)


@pytest.mark.parametrize("form", ["fp8_block", "fp8_channel", "fp8_tensor", "mxfp8"])
def test_the_largest_code_is_that_of_the_dtype(form):
    dtype = TORCH_DTYPES[FORMS[form].dtypes[0]]
    assert FORMS[form].largest == torch.finfo(dtype).max
