"""Rules on values: each wrong value is named by its tensor, and what is odd but right is not."""

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from broken_case import Case, assert_all, case, rows
from checkpoint_files import Change, Checkpoint, changed, lose, tensor, write
from good import with_scales
from good_checkpoints import GOOD
from keepmtp.validate.check.values import check_values
from written_values import fill, opened, poke

DOWN = "model.layers.2.mlp.experts.1.down_proj"
O_PROJ = "model.layers.1.self_attn.o_proj"
NO_WEIGHT = partial(changed, GOOD["released glm-4.7"], lose(re.escape(f"{O_PROJ}.weight")))
GPTQ = partial(
    changed,
    NO_WEIGHT,
    tensor(f"{O_PROJ}.qweight", "I32", 32, 256),
    tensor(f"{O_PROJ}.scales", "F16", 2, 256),
)


def holds(names: str, value: float, *, at: int | slice = slice(None)) -> Change:
    """All tensors get plausible values, and those of these names (an expression) this one."""

    def change(checkpoint: Checkpoint) -> None:
        before = checkpoint.after or fill

        def after(folder: Path) -> None:
            before(folder)
            entries = [name for name in opened(folder).source.entries if re.fullmatch(names, name)]
            assert entries, names
            for name in entries:
                poke(folder, name, value, at=at)

        checkpoint.after = after

    return change


def finds_values(rule: str, *cases: Case, level: str = "scales") -> Callable[[Case, Path], None]:
    """A test of these rows."""

    @rows(rule, *cases)
    def test(case: Case, tmp_path: Path) -> None:
        found = check_values(opened(write(tmp_path / "checkpoint", case.build())), level)
        assert_all(case, found)
        assert all(finding.origin == "values" for finding in found)

    return test


test_objections = finds_values(
    "norm",
    case(
        "a norm of zeros in the MTP block",
        "glm nvfp4",
        holds("model.layers.3.enorm.weight", 0.0),
        where="model.layers.3.enorm.weight",
        says="hidden state",
    ),
    case(
        "a norm of zeros is right where the model adds one",
        "next nvfp4",
        holds("mtp.norm.weight", 0.0),
        found=[],
    ),
    case(
        "a huge norm in the MTP block",
        "glm nvfp4",
        holds("model.layers.3.hnorm.weight", 1e30),
        where="model.layers.3.hnorm.weight",
        says="huge",
    ),
)


test_zero_points = finds_values(
    "zero-points",
    case(
        "GPTQ's zero points are the middle less one",
        "glm gptq",
        holds(f"{O_PROJ}.qzeros", 0x77777777),
        found=[],
    ),
    case(
        "GPTQ's zero points are the middle itself",
        "glm gptq",
        holds(f"{O_PROJ}.qzeros", -0x77777778),
        found=[],
    ),
    case(
        "zero points of symmetric integers that are others",
        "glm gptq",
        holds(f"{O_PROJ}.qzeros", 0x33333333),
        where=f"{O_PROJ}.qzeros",
        says="not those of symmetric integers",
    ),
    case(
        "one zero point is another",
        "glm gptq",
        holds(f"{O_PROJ}.qzeros", 0x77777777),
        holds(f"{O_PROJ}.qzeros", 0x77777776, at=0),
        where=f"{O_PROJ}.qzeros",
    ),
)


test_not_finite = finds_values(
    "finite",
    case(
        "vllm#45212, input scale inf",
        "glm nvfp4",
        holds(f"{DOWN}.input_global_scale", math.inf),
        says="1 of 1",
        where=f"{DOWN}.input_global_scale",
    ),
    case(
        "a scale of the cache that is NaN",
        with_scales,
        holds("model.layers.1.self_attn.k_scale", math.nan),
        where="model.layers.1.self_attn.k_scale",
    ),
    case(
        "NaN in a scale of GPTQ",
        GPTQ,
        holds(f"{O_PROJ}.scales", math.nan, at=0),
        where=f"{O_PROJ}.scales",
    ),
    # compressed-tensors#595: experts that no sample reached, some of thousands, are one finding.
    case(
        "infinite input scales in some experts",
        "glm nvfp4",
        holds(r"model\.layers\.[12]\.mlp\.experts\.\d\.down_proj\.input_global_scale", math.inf),
        count=8,
        where="model.layers.1.mlp.experts.0.down_proj.input_global_scale",
        cure="reach this module",
        among=True,
    ),
)


test_scale = finds_values(
    "scale-sign",
    case(
        "global scale 0",
        "glm nvfp4",
        holds(f"{DOWN}.weight_global_scale", 0.0),
        says="is 0",
        where=f"{DOWN}.weight_global_scale",
    ),
    case(
        "vllm#45320, input scale 0",
        "glm modelopt",
        holds(f"{DOWN}.input_scale", 0.0),
        says="divides",
        where=f"{DOWN}.input_scale",
    ),
    case(
        "block scales below 0",
        "glm nvfp4",
        holds(f"{DOWN}.weight_scale", -1.0),
        says="below 0",
        where=f"{DOWN}.weight_scale",
    ),
    case(
        "constant scales of one matrix",
        "glm nvfp4",
        holds(f"{DOWN}.weight_scale", 1.0),
        rule="scale-constant",
        severity="warning",
        where=f"{DOWN}.weight_scale",
    ),
    case(
        "a scale of the cache that is 0",
        with_scales,
        holds("model.layers.3.self_attn.attn.v_scale", 0.0),
        where="model.layers.3.self_attn.attn.v_scale",
    ),
    case(
        "scales of the cache below 0",
        with_scales,
        holds("model.layers.1.self_attn.k_scale", -0.5),
        where="model.layers.1.self_attn.k_scale",
    ),
    case(
        "scales of 0 of GPTQ",
        GPTQ,
        holds(f"{O_PROJ}.scales", 0.0),
        where=f"{O_PROJ}.scales",
    ),
    # AutoRound gives about half of its scales a sign. vLLM 0.32's int8 kernel of a CPU was asked: the
    # product with such rows is right.
    case(
        "a scale of GPTQ below 0",
        GPTQ,
        holds(f"{O_PROJ}.scales", -0.01, at=0),
        found=[],
    ),
    case(
        "a scale of packed integers below 0",
        NO_WEIGHT,
        tensor(f"{O_PROJ}.weight_packed", "I32", 256, 32),
        tensor(f"{O_PROJ}.weight_scale", "BF16", 256, 2),
        tensor(f"{O_PROJ}.weight_shape", "I64", 2),
        holds(f"{O_PROJ}.weight_scale", -0.01, at=0),
        found=[],
    ),
    case(
        "a scale of integers of 8 bits below 0",
        NO_WEIGHT,
        tensor(f"{O_PROJ}.weight", "I8", 256, 256),
        tensor(f"{O_PROJ}.weight_scale", "BF16", 256, 1),
        holds(f"{O_PROJ}.weight_scale", -0.01, at=0),
        found=[],
    ),
    case(
        "input scales of 0 in some experts",
        "glm modelopt",
        holds(r"model\.layers\.[12]\.mlp\.experts\.\d\.gate_proj\.input_scale", 0.0),
        count=8,
        where="model.layers.1.mlp.experts.0.gate_proj.input_scale",
        cure="reach this module",
        among=True,
    ),
)


test_empty = finds_values(
    "empty-weight",
    case(
        "a matrix of zeros in the MTP block",
        "glm nvfp4",
        holds("model.layers.3.eh_proj.weight", 0.0),
        where="model.layers.3.eh_proj.weight",
        says="nothing is accepted",
    ),
    case(
        "a packed weight of zeros, which no scale shows",
        "glm nvfp4",
        holds(f"{DOWN}.weight_packed", 128),
        found=[],
    ),
)


test_empty_of_all = finds_values(
    "empty-weight",
    case(
        "a packed weight of zeros",
        "glm nvfp4",
        holds(f"{DOWN}.weight_packed", 128),
        says="those of other values",
        where=f"{DOWN}.weight_packed",
    ),
    case(
        "a release's own matrix of zeros, packed",
        "glm nvfp4",
        holds(f"{DOWN}.weight_packed", 128),
        holds(f"{DOWN}.weight_scale", 1.0),
        severity="warning",
        where=f"{DOWN}.weight_packed",
        among=True,
    ),
    level="all",
)


test_magnitudes_are_those_of_weights = finds_values(
    "scale-magnitude",
    case(
        "a multiplier written as a divisor",
        "glm modelopt",
        holds(f"{DOWN}.weight_scale_2", 9000.0),
        says="reciprocal",
        where=f"{DOWN}.weight_scale",
    ),
    case(
        "a divisor written as a multiplier",
        "glm nvfp4",
        holds(f"{DOWN}.weight_global_scale", 0.0001),
        says="reciprocal",
        where=f"{DOWN}.weight_scale",
    ),
    case(
        "FP8 blocks, reciprocal",
        "v3 block",
        holds(f"{DOWN}.weight_scale", 4000.0),
        says="reciprocal",
        where=f"{DOWN}.weight_scale",
    ),
)


test_fused_scales_agree = finds_values(
    "fused-scales",
    case(
        "vllm#54150, gate and up",
        "glm modelopt",
        holds("model.layers.2.mlp.experts.1.up_proj.weight_scale_2", 0.0008),
        says="times what they should be",
        where="model.layers.2.mlp.experts.1.up_proj.weight_scale_2",
    ),
    case(
        "q, k and v",
        "glm nvfp4",
        holds("model.layers.1.self_attn.k_proj.weight_global_scale", 700.0),
        says="times what they should be",
        where="model.layers.1.self_attn.k_proj.weight_global_scale",
    ),
)


test_fused_scales_agree_of_scalars = finds_values(
    "fused-scales",
    case(
        "q_a and kv_a of DeepSeek-V3",
        "v3 nvfp4",
        holds(r"model\.layers\.1\..*kv_a_proj_with_mqa\.weight_global_scale", 700.0),
        where=".weight_global_scale",
        says="kv_a_proj_with_mqa, q_a_proj are one fused module",
    ),
    case(
        "q_a and kv_a, modelopt",
        "v3 modelopt",
        holds(r"model\.layers\.1\..*kv_a_proj_with_mqa\.weight_scale_2", 0.0009),
        where=".weight_scale_2",
        says="kv_a_proj_with_mqa, q_a_proj are one fused module",
    ),
    case(
        "wq_a and wkv of DeepSeek-V4",
        "dsv4 bf16",
        holds(r"layers\.1\.attn\.wkv\.weight_global_scale", 700.0),
        where=".weight_global_scale",
        says="wkv, wq_a are one fused module",
    ),
    case(
        "w1 and w3 of DeepSeek-V4",
        "dsv4 bf16",
        holds(r"layers\.1\..*experts\.1\.w3\.weight_global_scale", 700.0),
        where=".weight_global_scale",
        says="w1, w3 are one fused module",
    ),
    case(
        "w1 and w3, modelopt",
        "dsv4 nvfp4 experts",
        holds(r"layers\.1\..*experts\.1\.w3\.weight_scale_2", 0.0009),
        where=".weight_scale_2",
        says="w1, w3 are one fused module",
    ),
    case(
        "a shared expert",
        "v3 nvfp4",
        holds(r"model\.layers\.1\..*shared_experts\.up_proj\.weight_global_scale", 700.0),
        where=".weight_global_scale",
        says="gate_proj, up_proj are one fused module",
    ),
    case(
        "input scales of fused modules that differ",
        "glm nvfp4",
        holds("model.layers.2.mlp.experts.1.up_proj.input_global_scale", 3.0),
        severity="warning",
        where="model.layers.2.mlp.experts.1.up_proj.input_global_scale",
    ),
    level="scalars",
)


test_input_scales_are_measured = finds_values(
    "input-scale-constant",
    case(
        "constant scales",
        "glm nvfp4",
        holds(f"{DOWN}.weight_scale", 1.0),
        holds(".*input_global_scale", 1.0),
        found=[
            {"rule": "scale-constant", "severity": "warning"},
            {"severity": "warning"},
        ],
    ),
)


test_norms_have_learned = finds_values(
    "mtp-untrained",
    # The block was published, but not with what was trained.
    case(
        "MiniMax M2 47, norms as they were made",
        "glm nvfp4",
        holds(r"model\.layers\.3\..*norm.*", 1.0),
        severity="warning",
        says="all 7 norms of this MTP layer hold 1 only",
    ),
)
