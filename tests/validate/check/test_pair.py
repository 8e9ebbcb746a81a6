"""A target with a draft of its own: what is found of the two, and not of either alone."""

from pathlib import Path

import pytest
from checked import check
from checkpoint_files import Checkpoint, lose, write
from foreign_form import modelopt
from good import ours, released
from keepmtp import api
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.validate.check.check import examine
from keepmtp.validate.check.pair import as_of_draft, of_draft, with_draft

BACKBONE = r"model\.layers\.[0-2]\..*|model\.norm.*|lm_head.*"


def draft_of(checkpoint: Checkpoint) -> Checkpoint:
    """The block alone, with the embedding."""
    checkpoint.take(BACKBONE)
    return checkpoint


def found(tmp_path: Path, target: Checkpoint, draft: Checkpoint) -> list[tuple[str, str, str]]:
    place = write(tmp_path / "target", target)
    own = write(tmp_path / "draft", draft)
    (checked,) = api.check_all([place], draft=str(own))
    return [(each.rule, each.where, f"{each.says} {each.cure}") for each in checked.data.findings]


@pytest.mark.parametrize("scheme", ["bf16", "FP8_DYNAMIC"])
def test_good_pair(scheme, tmp_path):
    """A target that lost its block is good with it."""
    target = ours("glm-4.7", "FP8_DYNAMIC", scheme)
    target.take(r"model\.layers\.3\..*")
    assert found(tmp_path, target, draft_of(ours("glm-4.7", "FP8_DYNAMIC", scheme))) == []
    alone = check(tmp_path / "target")
    assert "mtp-missing" in [each.rule for each in alone.findings], "it is not, alone"


def test_objections(tmp_path):
    target = released("glm-4.7")
    draft = draft_of(released("glm-4.7"))
    target.config["hidden_size"] = 4096
    draft.config["vocab_size"] = 7
    found_of = found(tmp_path, target, draft)
    assert {rule for rule, *_ in found_of} == {"pair", "shapes"}, "the tensors have other sides"
    rows = [row for row in found_of if row[0] == "pair"]
    assert len(rows) == 2
    assert "draft/config.json: hidden_size" in rows[0][1] and "is 256, and 4096 in" in rows[0][2]


def test_objections_to_another_family(tmp_path):
    rows = found(tmp_path, released("mimo-7b"), draft_of(released("glm-4.7")))
    assert ("pair", "family", "is glm4_moe, and mimo in the target") in [
        (rule, where.rpartition(" ")[2], says.partition(":")[0]) for rule, where, says in rows
    ]


def test_only_a_known_draft_is_recorded(tmp_path):
    target = write(tmp_path / "target", released("glm-4.7"))
    draft = draft_of(released("glm-4.7"))
    draft.config["model_type"] = "unheard_of"
    (pair,) = api.check_all([target], draft=str(write(tmp_path / "draft", draft)))
    with pytest.raises(RecipeError, match=r"has a family's table; got none\. Leave --record out"):
        as_of_draft(pair, None)
    (target / "model.safetensors.index.json").write_text("{")
    (pair,) = api.check_all([target], draft=str(tmp_path / "draft"))
    with pytest.raises(CheckpointError, match="index"):
        as_of_draft(pair, None)


@pytest.mark.parametrize(
    ("model", "lost", "severity"),
    [
        ("mimo-7b", r"model\.embed_tokens\.weight", "warning"),
        ("dots3-note-prev", r".*mtp.*embed_tokens\.weight|model\.embed_tokens\.weight", "error"),
    ],
)
def test_embedding(model, lost, severity, tmp_path):
    """With one pipeline stage most drafts get the target's; one keeps its own."""
    own = write(tmp_path / "target", released(model))
    draft = released(model)
    lose(lost)(draft)
    checked = examine(write(tmp_path / "draft", draft))
    (finding,) = [each for each in of_draft(checked, examine(own).runtime) if "draft" in each.rule]
    assert finding.rule == "draft-embedding" and finding.severity == severity
    assert finding.where.endswith("embed_tokens.weight")


def test_as_the_target_builds(tmp_path):
    """Plain in a draft, packed by the target's config: the draft's own config is not read."""
    rows = found(
        tmp_path, ours("glm-4.7", "FP8_DYNAMIC", "FP8_DYNAMIC"), draft_of(released("glm-4.7"))
    )
    assert {rule for rule, *_ in rows} == {"draft-form"}
    assert rows[0][1].startswith("model.layers.3.") and rows[0][2].endswith("--mtp FP8_DYNAMIC")


@pytest.mark.parametrize("word", ["bf16", "FP8_DYNAMIC", "NVFP4A16"])
def test_a_target_that_needs_batches_gets_the_block_itself(word, tmp_path):
    """No word of --mtp would pass, so none is named."""
    target = modelopt("glm-4.7")
    target.quantization["ignore"] = ["lm_head"]
    rows = found(tmp_path, target, draft_of(ours("glm-4.7", "FP8_DYNAMIC", word)))
    cures = {cure for rule, _, cure in rows if rule == "draft-form"}
    assert cures and all(
        "keepmtp fix " in cure and "--from RELEASE" in cure and "--mtp" not in cure
        for cure in cures
    ), rows


def test_a_target_in_a_dialect_that_is_not_written(tmp_path):
    """No word would help, and the cure says so; but for FP8 in blocks, which a draft may have."""
    for block, cure in (
        ([64, 64], "in the dialect fp8, which keepmtp does not write"),
        ([128, 128], "--mtp FP8_BLOCK"),
    ):
        target = released("deepseek-v3.1")
        target.config["quantization_config"]["weight_block_size"] = block
        draft = draft_of(ours("deepseek-v3.1", "FP8_BLOCK"))
        place = tmp_path / f"{block[0]}"
        place.mkdir()
        rows = found(place, target, draft)
        assert "draft-form" in {rule for rule, *_ in rows}
        assert any(words.endswith(cure) for *_, words in rows), rows


def test_a_class_that_reads_its_own_config(tmp_path):
    target = ours("nemotron-3-super", "FP8_DYNAMIC")
    draft = examine(
        write(tmp_path / "draft", ours("nemotron-3-super", "FP8_DYNAMIC", "FP8_DYNAMIC"))
    )
    assert with_draft(examine(write(tmp_path / "target", target)), draft).data.ok


def test_a_draft_alone_is_no_model(tmp_path):
    own = write(tmp_path / "draft", draft_of(released("glm-4.7")))
    (finding,) = check(own).findings
    assert (finding.rule, finding.where) == ("draft-alone", "model.layers.0.*")
