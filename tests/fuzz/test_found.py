"""What fuzzing found in files that several verbs read, each once."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import measured
import pytest
from checked import check
from checkpoint_files import write
from commands import GLM
from data_files import json_of, put_json, table
from good_checkpoints import GOOD
from keepmtp.checkpoints.files import write_whole
from keepmtp.checkpoints.identity import identify
from keepmtp.checkpoints.source import open_source
from keepmtp.cli import serving
from keepmtp.cli.init import init
from keepmtp.cure.rewritten import kept_files
from keepmtp.recipes.errors import CheckpointError
from keepmtp.recipes.families import families
from keepmtp.recipes.family_view import FamilyView
from keepmtp.validate.facts.results import read_result
from keepmtp.validate.measure.harness import has_template
from keepmtp.validate.measure.store import Answer, read_lines
from keepmtp.validate.measure.texts import held_out, read_prompts
from keepmtp.validate.report.best_k import BestK
from keepmtp.validate.report.card_metadata import read_front_matter
from keepmtp.validate.report.provenance import recipe_text
from keepmtp.validate.report.report import of_checkpoint, read_json, refresh, verify
from sealed import seal

TABLE = table("fuzz/test_found")
READERS = {
    "check.json": lambda path: read_result(path.parent, "check"),
    "report.json": read_json,
    "recipe.yaml": lambda path: recipe_text(path.parent),
    "answers.jsonl": lambda path: read_lines(path, Answer),
    "serve.jsonl": read_prompts,
    "serve.txt": read_prompts,
    "held_out.jsonl": lambda path: held_out(path, None),
    "held_out.txt": lambda path: held_out(path, None),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="regular file"):
        READERS[name](tmp_path / name)


def test_links_that_lead_to_each_other_are_refused(tmp_path):
    folder = write(tmp_path / "NAME", GOOD["glm fp8"]())
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(CheckpointError, match="link"):
        open_source(folder)


def test_a_report_without_its_identity_is_not_what_the_results_make(tmp_path):
    path = measured.measured(tmp_path / "NAME") / "report.json"
    refresh(path.parent)
    report = json_of(path)
    del report["identity"]
    put_json(path, report)
    with pytest.raises(CheckpointError, match=r"report\.json: identity: must be as the result"):
        verify(path.parent)


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 20_000,
        f"a: {'9' * 5000}",
        "a: 2020-99-99",
        "a: !!python/tuple [1]",
        "- a",
        "ÿ",
    ],
)
def test_front_matter_that_is_no_yaml_is_refused(text, tmp_path):
    (tmp_path / "README.md").write_text(f"---\n{text}\n---\n", "latin1")
    with pytest.raises(CheckpointError, match=r"README\.md: front matter must be a YAML mapping"):
        read_front_matter(tmp_path)


@pytest.mark.parametrize(
    "raw", [b"[]", b"", b"{", '{"a": 1}'.encode("utf-16"), b'{"a":' * 5000], ids=range(5)
)
def test_modelopts_file_must_be_json_where_vllm_reads_it(raw, tmp_path):
    for name, is_read in (("glm modelopt file", True), ("glm modelopt", False)):
        folder = write(tmp_path / name, GOOD[name]())
        (folder / "hf_quant_config.json").write_bytes(raw)
        report = check(folder)
        assert report.ok is not is_read
        assert not is_read or "hf_quant_config.json" in report.findings[0].where


@pytest.mark.parametrize("key", TABLE["KEYS"])
@pytest.mark.parametrize("value", TABLE["NUMBERS"], ids=str)
def test_a_number_that_memory_is_counted_by(key, value):
    view = FamilyView(family=families()["glm4_moe"], config={key: value})
    with pytest.raises(CheckpointError, match=rf"config\.json: {key} must be a whole number; got"):
        view.number(key)
    assert [view.number("absent"), replace(view, config={key: 3}).number("absent", key)] == [0, 3]


def test_a_file_whose_name_is_no_utf_8_is_refused_before_anything_is_written(tmp_path):
    folder = write(tmp_path / "NAME", GOOD["glm fp8"]())
    (folder / "\udc80").mkdir()
    (folder / "\udc80" / "x").write_text("x")
    for reads in (lambda: identify(folder), lambda: kept_files(open_source(folder))):
        with pytest.raises(
            CheckpointError, match=r"every name must be UTF-8; got '\\udc80'\. Rename it"
        ):
            reads()


def test_a_name_that_is_no_utf_8_is_named(tmp_path):
    with pytest.raises(
        CheckpointError,
        match=r"every name in it must be UTF-8; got '\\udcff'\. Rename what is called so",
    ):
        write_whole(tmp_path / "page.html", "of a folder called \udcff")
    assert not list(tmp_path.iterdir())


ODD = [b'{"a": "\xc1", "chat_template": "x"}', '{"chat_template": 1}'.encode("utf-16"), b"\0"]


@pytest.mark.parametrize("content", ODD)
def test_a_tokenizers_file_of_other_bytes_is_asked_for_its_template(content, tmp_path):
    folder = write(tmp_path / "NAME", GOOD["glm fp8"]())
    (folder / "tokenizer_config.json").write_bytes(content)
    assert has_template(open_source(folder), []) is (b'"chat_template"' in content)
    assert has_template(open_source(folder), ["--chat-template=x.jinja"])


def test_a_folders_name_moves_no_cursor(tmp_path, capsys):
    folder = tmp_path / "\x1b[31m\u202ea\rb"
    shutil.copytree(GLM, folder)
    serving.print_command(
        open_source(folder), BestK(k=1, why="as you say"), (), host="::", port="1", as_json=False
    )
    init(str(folder), out=Path(f"{folder}.yaml"))
    said = capsys.readouterr().out
    assert said.count(r"\x1b[31m\u202ea\rb") == 2 and not {*"\x1b\u202e\r"} & {*said}


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda folder: None, ""),
        (
            lambda folder: put_json(folder / "NAME/config.json", []),
            "error of the headers; got none",
        ),
        (lambda folder: forged(folder, dialect="x\ny"), r"headers' dialect, .*; got x\\ny"),
    ],
)
def test_results_that_are_sealed_anew_do_not_hide_the_headers(change, says, tmp_path):
    measured.measured(tmp_path / "NAME")
    change(tmp_path)
    seal(tmp_path)
    if not says:
        assert of_checkpoint(tmp_path / "NAME").judgement.verdict == "pass"
        return
    with pytest.raises(CheckpointError, match=says):
        of_checkpoint(tmp_path / "NAME")


def forged(folder: Path, **facts: object) -> None:
    path = folder / "NAME.report" / "check.json"
    result = json_of(path)
    result["data"]["facts"] |= facts
    put_json(path, result)
