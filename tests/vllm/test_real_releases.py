"""Real releases in the dry load: what their sizes, keys and forms ask for, and tiny models of good
manners do not show.

Each config.json has the release's own keys; where they come from stands at its layout
(tests/helpers/layouts).
"""

from pathlib import Path

import foreign_form
import pytest
from checkpoint_files import Checkpoint, as_source, lose, write, write_single
from good import released
from keepmtp.checkpoints.mtp_source import with_mtp_of
from keepmtp.quantize.config.written import files_of
from keepmtp.quantize.plan.plan import make_plan
from keepmtp.recipes.find import find_recipe
from keepmtp.validate.check.check import Checked
from keepmtp.validate.dryload.check_on import check_on
from keepmtp.validate.facts.vllm_env import find_vllm
from modelopt_form import mixed_in_two_files
from real_releases import dspark_flash, minimax_halves, nemotron_ultra, qwen38_fp8
from releases import source_layout

pytestmark = pytest.mark.vllm

QWEN38 = "qwen3.8-flash-next"
# Rows of embedding and head at the tiny width of 256: 9.2 GB each.
MANY_WORDS = 18_000_000


def at_full_size(model: str) -> Checkpoint:
    config, tensors = source_layout(model, size="full")
    return Checkpoint(config=config, tensors=dict(tensors))


def without_a_part_of_the_table() -> Checkpoint:
    checkpoint = released(QWEN38)
    lose(r".*\.ngram_embedding\.shard_1\.weight")(checkpoint)
    return checkpoint


def quantized(checkpoint: Checkpoint, recipe: str, folder: Path) -> Checkpoint:
    """What keepmtp writes from it."""
    plan = make_plan(find_recipe(recipe)[0], as_source(checkpoint, folder))
    outputs = {
        output.name: (output.dtype, output.shape)
        for tensor in plan.tensors
        for output in tensor.outputs
    }
    return Checkpoint(config=files_of(plan)["config.json"], tensors=outputs)


def joined_minimax(folder: Path) -> Checkpoint:
    joined = with_mtp_of(*(as_source(half, folder) for half in minimax_halves()))
    tensors = {str(name): (entry.dtype, entry.shape) for name, entry in joined.entries.items()}
    return Checkpoint(config=dict(joined.config), tensors=tensors)


def large(*lost: str) -> Checkpoint:
    """Two shards of 9.2 GB, or one file of 18: the draft's loader opens each to see what is in
    it.
    """
    checkpoint = released("qwen3.5-397b", text_config={"vocab_size": MANY_WORDS})
    for pattern in lost:
        lose(pattern)(checkpoint)
    return checkpoint


def with_a_strange_depth() -> Checkpoint:
    """A tensor in a depth that vLLM builds, under a name that it does not know."""
    checkpoint = released("inkling", mtp_config={"num_nextn_predict_layers": 8})
    checkpoint.rename(r"(model\.mtp\.layers\.0\.)hidden_norm\.weight", r"\1strange_norm.weight")
    return checkpoint


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> dict[str, Checked]:
    """What is found on sm100; a vLLM takes 10 s to start, so one judges all."""
    made = {
        "full-size table": at_full_size(QWEN38),
        "part of the table": without_a_part_of_the_table(),
        "layers by kind": nemotron_ultra(),
        "table in FP8": qwen38_fp8(),
        "quantized, table in FP8": quantized(qwen38_fp8(), QWEN38, tmp_path_factory.mktemp("none")),
        "MTP block of its own repository": quantized(
            joined_minimax(tmp_path_factory.mktemp("none")),
            "minimax-m3",
            tmp_path_factory.mktemp("none"),
        ),
        "eight depths": released("inkling", mtp_config={"num_nextn_predict_layers": 8}),
        "a depth that no release has": with_a_strange_depth(),
        "DSpark": dspark_flash(),
        "the list that vLLM does not read is wrong": mixed_in_two_files(
            here=["*self_attn*"], there=["lm_head"]
        ),
        "the list that vLLM reads is wrong": mixed_in_two_files(
            here=["lm_head"], there=["*self_attn*"]
        ),
        "for AMD": foreign_form.quark_mxfp4(exclude=[r"re:model\.layers\.3\."]),
        "shards of 9 GB": large(),
        "shards of 9 GB without a norm": large(r"mtp\.pre_fc_norm_hidden\.weight"),
    }
    place = tmp_path_factory.mktemp("releases")
    folders: list[Path] = [write(place / name, checkpoint) for name, checkpoint in made.items()]
    folders.append(write_single(place / "one file of 18 GB", large()))
    found = check_on([str(folder) for folder in folders], vllm=find_vllm(), gpus=["sm100"])
    return {folder.name: checked for folder, checked in zip(folders, found, strict=True)}


def errors(checked: Checked) -> list[str]:
    return [str(finding) for finding in checked.data.findings if finding.severity == "error"]


def test_a_table_of_95_gib_in_pinned_memory_takes_none_of_this_machines(judged):
    """vLLM keeps Qwen3.8-Flash-Next's n-gram table in pinned CPU memory (common/ngram_embedding.py:
    cpu_offload).
    """
    checked = judged["full-size table"]
    (load,) = checked.data.dry
    assert errors(checked) == []
    assert load.ok and load.target.num_written == load.target.num_params > 1000
    assert load.peak_mib < 2048, "a weight was really allocated"


def test_the_table_must_be_filled_all_the_same(judged):
    """The twin: a part of the table is lost, and vLLM says nothing."""
    assert any(
        "ngram_embedding" in error and "in part only" in error
        for error in errors(judged["part of the table"])
    )


def test_layers_that_only_a_list_counts_are_loaded(judged):
    """Nemotron-3-Ultra has layers_block_type in place of num_hidden_layers."""
    checked = judged["layers by kind"]
    assert errors(checked) == []
    assert checked.data.dry[0].ok and checked.runtime.view.num_layers == 4


def test_mtp_layers_that_are_not_built_at_this_k_are_a_fact_and_no_error(judged):
    """Inkling has eight, and vLLM builds one for each drafted token: 140 errors at k=1 before."""
    checked = judged["eight depths"]
    assert errors(checked) == []
    (load,) = checked.data.dry
    facts = checked.data.facts
    assert load.ok and facts.mtp_layers_follow_k
    assert (facts.num_mtp_layers, facts.idle_mtp_layers(load.k), facts.idle_mtp_layers(8)) == (
        8,
        7,
        0,
    )


def test_an_mtp_layer_that_is_built_must_be_whole(judged):
    """The twin."""
    assert any(
        "model.mtp.layers.0.hidden_norm" in error
        for error in errors(judged["a depth that no release has"])
    )


@pytest.mark.parametrize("name", ["table in FP8", "quantized, table in FP8"])
def test_a_table_in_fp8_is_loaded_as_such(name, judged):
    """Qwen3.8-Flash-Next-FP8, and what keepmtp writes from it: the rows and their one scale."""
    checked = judged[name]
    assert errors(checked) == []
    assert (
        checked.data.dry[0].ok
        and checked.data.dry[0].target.num_written == checked.data.dry[0].target.num_params
    )


def test_an_mtp_block_of_its_own_repository_is_drafted_with(judged):
    """MiniMax-M3: what keepmtp writes from the release and the block beside it."""
    checked = judged["MTP block of its own repository"]
    assert errors(checked) == []
    (load,) = checked.data.dry
    assert (
        load.ok
        and load.draft.cls == "MiniMaxM3MTP"
        and load.draft.num_written == load.draft.num_params > 5
    )


@pytest.mark.parametrize("name", ["shards of 9 GB", "one file of 18 GB"])
def test_a_file_may_be_larger_than_what_a_load_may_allocate(name, judged):
    """What a load may allocate is 8 GiB, and a mapping of a file is not that: four much-read
    releases were refused.
    """
    checked = judged[name]
    assert max(path.stat().st_size for path in Path(checked.data.path).glob("*.safetensors")) > 9e9
    assert errors(checked) == []
    (load,) = checked.data.dry
    assert load.ok and load.draft.num_written == load.draft.num_params > 5
    assert load.peak_mib < 2048


def test_a_large_file_is_judged_all_the_same(judged):
    """The twin."""
    assert any(
        "mtp.pre_fc_norm_hidden" in error
        for error in errors(judged["shards of 9 GB without a norm"])
    )


def test_a_build_for_another_makers_gpus_is_called_that(judged):
    """vLLM 0.32.0 picks CUTLASS for these experts on sm100, and has no way to prepare Quark's for
    it.
    """
    [error] = [
        finding for finding in judged["for AMD"].data.findings if finding.severity == "error"
    ]
    assert (
        error.rule == "no-kernel"
        and "CUTLASS_MXFP4_MXFP4" in error.says
        and "AMD's GPUs" in error.cure
    )


def test_stages_of_dspark_are_no_mtp_block(judged):
    """DeepSeek-V4-Flash-0731 had 13 errors, eight of them with `graft` of the release onto
    itself.
    """
    [finding] = judged["DSpark"].data.findings
    assert (finding.rule, finding.severity) == ("family", "error")
    assert "drafts by DSpark" in finding.says
    assert '"method": "dspark", "num_speculative_tokens": 5' in finding.cure and "graft" not in str(
        finding
    )


def test_of_two_lists_the_check_and_vllm_read_the_same(judged):
    """modelopt's MIXED_PRECISION without quantized_layers in config.json."""
    good, broken = (
        judged[f"the list that vLLM {does} is wrong"] for does in ("does not read", "reads")
    )
    assert errors(good) == [] and good.data.dry[0].ok
    origins = {finding.origin for finding in broken.data.findings if finding.severity == "error"}
    assert origins == {"static", "dry"}
