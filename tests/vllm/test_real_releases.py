"""Real releases in the dry load: what their sizes, keys and forms ask for, and tiny models of good
manners do not show; and that vLLM's own classes agree with the static verdict on public quantized
ones.

Each config.json has the release's own keys; where they come from stands at its layout
(tests/helpers/layouts).
"""

from pathlib import Path

import foreign_form
import pytest
from broken import WITHOUT_MTP
from checkpoint_files import Checkpoint, as_source, lose, write, write_single
from foreign_form import mixed_in_two_files
from good import outputs_of, released
from keepmtp.checkpoints.mtp_source import with_mtp_of
from keepmtp.checkpoints.source import Source
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.find import find_recipe
from keepmtp.validate.check.check import Checked
from keepmtp.validate.dryload.check_on import check_on
from keepmtp.validate.facts.vllm_env import find_vllm
from real_releases import minimax_halves, nemotron_ultra, published, qwen38_fp8, real_release
from releases import source_layout
from without_mtp import SAID, llama

pytestmark = [pytest.mark.vllm, pytest.mark.full]

QWEN38 = "qwen3.8-flash-next"
# Rows of embedding and head at the tiny width of 256: 9.2 GB each.
MANY_WORDS = 18_000_000
NOWHERE = Path("/nonexistent")
# Words that the stages of DSpark take.
STAGES = ("source", "bf16", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "W4A16")
# What vLLM loads whole.
GOOD = (
    "full-size table",
    "layers by kind",
    "table in FP8",
    "quantized, table in FP8",
    "MTP block of its own repository",
    "eight depths",
    "DSpark",
    "DSpark without its confidence head",
    *[f"DSpark, MTP {word}" for word in STAGES],
    "the list that vLLM does not read is wrong",
    "shards of 9 GB",
    "one file of 18 GB",
)
# The twins, and what an error has: vLLM may say nothing.
BROKEN = {
    "part of the table": ("ngram_embedding", "in part only"),
    "a depth that no release has": ("model.mtp.layers.0.hidden_norm",),
    "shards of 9 GB without a norm": ("mtp.pre_fc_norm_hidden",),
    # vLLM 0.32.0 picks CUTLASS for these experts on sm100, and cannot prepare Quark's for it.
    "for AMD": ("no-kernel", "CUTLASS_MXFP4_MXFP4", "AMD's GPUs"),
    "DSpark without a stage": ("dry-load", "model.layers.1.", "filled by nothing"),
}
# One of each dialect and producer: modelopt's two files, a mixture by names, experts of GPTQ, `+:`
# for a plain draft.
PUBLIC = (
    "deepseek-v3.1-nvfp4",
    "deepseek-v4-flash-nvfp4",
    "nemotron-3.5-lightning-nvfp4",
    "qwen3.5-397b-a17b-gptq-int4",
    "qwen3.6-35b-a3b-nvfp4",
    "qwen3.8-27b-w4a16-autoround-gptq",
)
# Models that never had an MTP block: the tool that quantized them, and whether they have experts.
PLAIN = {
    f"llama {tool}{' experts' * experts}": (tool, experts)
    for tool in ("", *SAID)
    for experts in (False, True)
}


def changed(checkpoint: Checkpoint, *lost: str) -> Checkpoint:
    for pattern in lost:
        lose(pattern)(checkpoint)
    return checkpoint


def large(*lost: str) -> Checkpoint:
    """Two shards of 9.2 GB, or one file of 18: the draft's loader opens each to see what is in
    it.
    """
    return changed(released("qwen3.5-397b", text_config={"vocab_size": MANY_WORDS}), *lost)


def quantized(source: Source, recipe: str) -> Checkpoint:
    """What keepmtp writes from it."""
    return outputs_of(make_plan(find_recipe(recipe)[0], source))


def eight_depths() -> Checkpoint:
    return released("inkling", mtp_config={"num_nextn_predict_layers": 8})


def with_a_strange_depth() -> Checkpoint:
    """A tensor in a depth that vLLM builds, under a name that it does not know."""
    checkpoint = eight_depths()
    checkpoint.rename(r"(model\.mtp\.layers\.0\.)hidden_norm\.weight", r"\1strange_norm.weight")
    return checkpoint


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[str, Checked]:
    """What is found on sm100; a vLLM takes 10 s to start, so one judges all."""
    config, tensors = source_layout(QWEN38, size="full")
    halves = (as_source(half, NOWHERE) for half in minimax_halves())
    made = {
        "full-size table": Checkpoint(config=config, tensors=dict(tensors)),
        "part of the table": changed(released(QWEN38), r".*\.ngram_embedding\.shard_1\.weight"),
        "layers by kind": nemotron_ultra(),
        "table in FP8": qwen38_fp8(),
        "quantized, table in FP8": quantized(as_source(qwen38_fp8(), NOWHERE), QWEN38),
        "MTP block of its own repository": quantized(with_mtp_of(*halves), "minimax-m3"),
        "eight depths": eight_depths(),
        "a depth that no release has": with_a_strange_depth(),
        "DSpark": released("dsv4-flash-0731"),
        "DSpark without its confidence head": changed(
            released("dsv4-flash-0731"), r"mtp\.2\.confidence_head\..*"
        ),
        "DSpark without a stage": changed(released("dsv4-flash-0731"), r"mtp\.1\..*"),
        "the list that vLLM does not read is wrong": mixed_in_two_files(
            here=["*self_attn*"], there=["lm_head"]
        ),
        "the list that vLLM reads is wrong": mixed_in_two_files(
            here=["lm_head"], there=["*self_attn*"]
        ),
        "for AMD": foreign_form.quark_mxfp4(exclude=[r"re:model\.layers\.3\."]),
        "shards of 9 GB": large(),
        "shards of 9 GB without a norm": large(r"mtp\.pre_fc_norm_hidden\.weight"),
    } | {name: real_release(name) for name in PUBLIC}
    for word in STAGES:
        recipe = find_recipe("dsv4-flash-0731.nvfp4a16-fp8")[0].model_copy(update={"mtp": word})
        source = as_source(released("dsv4-flash-0731"), NOWHERE)
        made[f"DSpark, MTP {word}"] = outputs_of(make_plan(recipe, source))
    made |= {name: llama(tool, experts=experts) for name, (tool, experts) in PLAIN.items()}
    made |= {case.name: case.build() for case in WITHOUT_MTP}
    place = tmp_path_factory.mktemp("releases")
    folders = [write(place / name, checkpoint) for name, checkpoint in made.items()]
    folders.append(write_single(place / "one file of 18 GB", large()))
    found = check_on([str(folder) for folder in folders], vllms=[find_vllm()], gpus=["sm100"])
    return {folder.name: checked for folder, checked in zip(folders, found, strict=True)}


def errors(checked: Checked) -> list[str]:
    found = (each for each in checked.data.findings if each.severity == "error")
    return [f"{each.rule} {each}" for each in found]


@pytest.mark.parametrize("name", GOOD)
def test_it_is_loaded_whole(name, judged):
    """vLLM keeps Qwen3.8-Flash-Next's n-gram table, 95 GiB, in pinned CPU memory
    (common/ngram_embedding.py: cpu_offload). What a load may allocate is 8 GiB, and a mapping of a
    file is not that: four much-read releases were refused.
    """
    checked = judged[name]
    assert errors(checked) == []
    (load,) = checked.data.dry
    assert load.ok and load.peak_mib < 2048, "a weight was really allocated"
    for model in (load.target, load.draft):
        assert model.num_written == model.num_params > 5


@pytest.mark.parametrize("name", BROKEN)
def test_a_twin_is_told_with_its_culprit(name, judged):
    assert any(all(word in error for word in BROKEN[name]) for error in errors(judged[name]))
    assert len(errors(judged[name])) == 1 or name != "for AMD"


def test_what_was_built_is_what_there_is(judged):
    """Files of 9 GB and more; Nemotron-3-Ultra has layers_block_type in place of num_hidden_layers;
    MiniMax-M3's block.
    """
    for name in ("shards of 9 GB", "one file of 18 GB"):
        files = Path(judged[name].data.path).glob("*.safetensors")
        assert max(path.stat().st_size for path in files) > 9e9
    assert judged["full-size table"].data.dry[0].target.num_params > 1000
    assert judged["layers by kind"].runtime.view.num_layers == 4
    assert judged["MTP block of its own repository"].data.dry[0].draft.cls == "MiniMaxM3MTP"


def test_mtp_layers_that_are_not_built_at_this_k_are_no_error(judged):
    """Inkling has eight, and vLLM builds one for each drafted token: 140 errors at k=1 before."""
    facts = judged["eight depths"].data.facts
    assert facts.mtp_layers_follow_k and facts.num_mtp_layers == 8


def test_of_two_lists_the_check_and_vllm_read_the_same(judged):
    """modelopt's MIXED_PRECISION without quantized_layers in config.json."""
    found = judged["the list that vLLM reads is wrong"].data.findings
    assert {each.origin for each in found if each.severity == "error"} == {"static", "dry"}


# vLLM 0.30 to 0.32 cannot load a packed head of Nemotron's.
OF_0_32 = {"nemotron-3.5-lightning-nvfp4": [["error", "glue", "lm_head.weight"]]}


@pytest.mark.parametrize("name", PUBLIC)
def test_vllm_says_of_public_releases_what_the_static_check_says(name, judged):
    """Judged by the rules of this vLLM; the table has what the newest says."""
    checked = judged[name]
    found = [each for each in checked.data.findings if each.origin == "static"]
    static = [[each.severity, each.rule, each.where] for each in found]
    assert static == [*OF_0_32.get(name, ()), *published(name)["findings"]]
    is_refused = any(severity == "error" for severity, *_ in static)
    assert checked.accounts[0].load.ok != is_refused, checked.data.findings


@pytest.mark.parametrize("name", PLAIN)
def test_a_model_without_mtp_is_loaded_without_a_draft(name, judged):
    data = judged[name].data
    assert [finding.rule for finding in data.findings] == ["family"], data.findings
    (load,) = data.dry
    assert load.ok and load.k == 0 and load.draft.cls == ""
    assert load.target.num_written == load.target.num_params > 30


@pytest.mark.parametrize("name", [case.name for case in WITHOUT_MTP])
def test_vllm_agrees_that_a_broken_one_is_broken(name, judged):
    found = judged[name].data.findings
    assert {each.origin for each in found if each.severity == "error"} == {"static", "dry"}, found
