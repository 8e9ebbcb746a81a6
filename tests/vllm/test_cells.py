"""A sample of benchmarks/cells.py: tensors broken one by one, and the static check says what vLLM
does.
"""

import re
from functools import partial

import cells
import pytest
import releases
from checkpoint_files import as_source
from keepmtp.checkpoints.dialects.runtime_view import RuntimeView
from keepmtp.validate.facts.vllm_env import find_vllm

MODELS = ("glm-4.7", "deepseek-r1", "mimo-7b")
STEP = 6  # every so many cells of each


@pytest.mark.vllm
def test_the_static_check_says_what_vllm_does(dry_loader, monkeypatch, tmp_path):
    monkeypatch.setattr(cells, "VERSION", find_vllm().version)
    monkeypatch.setattr(cells, "KEPT", tmp_path / "kept")
    parted = list[str]()
    seen = set[str]()
    for model in MODELS:
        checkpoint, dry = cells.released(model), partial(dry_loader, "sm90")
        for cell, static, loaded in cells.judged(
            f"{model}: released", checkpoint, tmp_path / model, dry, STEP
        ):
            seen.add(cell.broken)
            if bool(static) != bool(loaded):
                parted.append(f"{model} {cell.key}: {static or loaded}")
    assert {"transposed", "halved", "missing", "as F8_E4M3"} <= seen
    assert not parted


FOUND = (
    r"mixer.*(up|down)\.weight [ht]|ngram_heads_.* h|shard_(0.* [ht]|. missing)|qkv_proj.* [ht]"
    r"|qkv_proj\.\w+ as U8|ffn\.gate\.\w+ h|(tid2eid|[og]_proj\.weight|wkv\.weight) transposed"
    r"|engram\.embed\.(\w+ [ht]|scale as [BF])|index_\w+\.weight h|output\.weight missing"
)


@pytest.mark.parametrize("model", releases.MODELS)
def test_what_no_other_layer_shows(model, tmp_path):
    """vLLM 0.33.0 raises on each, or reads other numbers."""
    checkpoint = cells.released(model)
    for cell in cells.cells_of(RuntimeView.of(as_source(checkpoint, tmp_path)), is_block=False):
        if re.search(FOUND, cell.key):
            assert cells.static_says(checkpoint, tmp_path, cell)
