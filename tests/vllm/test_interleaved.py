"""q, k and v of MiMo-V2.5, written apart, against the function with which vLLM puts the release's
rows in order.
"""

import json
from pathlib import Path

import pytest
from commands import captured
from keepmtp.checkpoints.source import open_source
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.quantize.write.output import claim, publish
from keepmtp.quantize.write.writer import write
from keepmtp.recipes.find import find_recipe
from keepmtp.validate.facts.vllm_env import find_vllm
from releases import source_layout, write_checkpoint

pytestmark = [pytest.mark.vllm, pytest.mark.full]

# vLLM's part of a rank, [q; k; v] in FP8 with blocks, against the same rows of three whole
# matrices.
COMPARE = """
import json, sys, torch
from pathlib import Path
from safetensors.torch import load_file
from vllm.model_executor.models.mimo_v2 import _shard_fp8_qkv_proj
source, ours = ({k: v for f in Path(p).glob("*.safetensors") for k, v in load_file(f).items()} for p in sys.argv[1:])
errors = {}
for stem, groups in (("model.layers.0.", 4), ("model.layers.1.", 8), ("model.mtp.layers.0.", 8)):
    weight, scale = (source[f"{stem}self_attn.qkv_proj.{leaf}"] for leaf in ("weight", "weight_scale_inv"))
    q, k, v = (ours[f"{stem}self_attn.{name}_proj.weight"].float() for name in "qkv")
    for size in (1, 2, 4, 8):
        for rank in range(size):
            theirs, factor = _shard_fp8_qkv_proj(weight, scale, num_heads=8, num_kv_heads=groups, head_dim=192,
                                                 v_head_dim=128, tp_rank=rank, tp_size=size, ckpt_tp=4)
            factor = factor.repeat_interleave(128, 0)[: len(theirs)].repeat_interleave(128, 1)[:, : theirs.shape[1]]
            theirs, cut = theirs.float() * factor, min(size, groups)
            mine = torch.cat([q.chunk(size)[rank], *(part.chunk(cut)[rank * cut // size] for part in (k, v))])
            errors[f"{stem} TP {size} rank {rank}"] = ((mine - theirs).norm() / theirs.norm()).item()
print(json.dumps(errors))
"""


def test_each_rank_gets_the_rows_that_vllm_gives_it(tmp_path):
    config, tensors = source_layout("mimo-v2.5")
    source = write_checkpoint(tmp_path / "source", config, tensors, data="random")
    recipe, text = find_recipe("mimo-v2.5")
    plan = make_plan(recipe, open_source(source))
    out = tmp_path / "out"
    with claim(plan, out) as partial:
        write(plan, partial, recipe_text=text, threads=1)
        publish(partial, out)
    command = [str(find_vllm().python), "-P", "-c", COMPARE, str(source), str(out)]
    done = captured(command, check=True, cwd=Path(tmp_path))
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 3 * 15
    # At four ranks vLLM takes the slices as they are: BF16's rounding, 2**-9. Else it rounds to
    # E4M3 again: 2**-4.
    for where, error in errors.items():
        assert error < (2**-8 if "TP 4" in where else 2**-4), where
