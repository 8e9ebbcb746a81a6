"""Layouts whose published names transformers reads but does not write: it must load all of them,
and miss nothing.
"""

import pytest
import releases

# save_pretrained of these classes spells some names in another way than the release (transformers
# 5.17).
READ_NOT_WRITTEN = ("minimax-m3", "hy4-preview", "qwen3.8-flash-next")


@pytest.mark.parametrize("model", READ_NOT_WRITTEN)
def test_transformers_loads_the_published_names(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config, tensors = releases.source_layout(model, size="tiny")
    releases.write_checkpoint(tmp_path, config, tensors, data="random")
    model_class = getattr(transformers, config["architectures"][0])
    _, loading = model_class.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.bfloat16
    )
    assert {key: sorted(names) for key, names in loading.items() if names} == {}


def test_a_wrong_name_is_noticed(tmp_path):
    transformers = pytest.importorskip("transformers")
    config, tensors = releases.source_layout("hy4-preview", size="tiny")
    wrong = {name.replace("linear_gate", "gate"): spec for name, spec in tensors.items()}
    releases.write_checkpoint(tmp_path, config, wrong, data="random")
    model_class = getattr(transformers, config["architectures"][0])
    _, loading = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert any("gate_proj" in name for name in loading["missing_keys"])
