"""A sample of benchmarks/cells.py: tensors broken one by one, and the static check says what vLLM
does.
"""

from contextlib import ExitStack
from functools import cache
from pathlib import Path

import cells
import pytest
from keepmtp.validate.dryload import loader
from keepmtp.validate.dryload.loader import DryLoader
from keepmtp.validate.facts.vllm_env import find_vllm

MODELS = ("glm-4.7", "deepseek-r1", "mimo-7b")
STEP = 6  # every so many cells of each


@pytest.mark.vllm
def test_the_static_check_says_what_vllm_does(monkeypatch, tmp_path):
    vllm = find_vllm()
    monkeypatch.setattr(cells, "VERSION", vllm.version)
    monkeypatch.setattr(cells, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(loader, "_CURES", Path(cells.__file__).with_name("cells_in_vllm"))
    parted = list[str]()
    seen = set[str]()
    with ExitStack() as stack:

        @cache
        def dry() -> DryLoader:
            return stack.enter_context(DryLoader(vllm, gpu="sm90"))

        for model in MODELS:
            checkpoint = cells.released(model)
            for cell, static, loaded in cells.judged(
                f"{model}: released", checkpoint, tmp_path / model, dry, STEP
            ):
                seen.add(cell.broken)
                if bool(static) != bool(loaded):
                    parted.append(f"{model} {cell.key}: {static or loaded}")
    assert {"transposed", "halved", "missing", "as F8_E4M3"} <= seen
    assert not parted
