"""Calibration text: the same ids every time, nothing held out that was calibrated on, and what is
refused and how.
"""

import json
import os
import sys
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commands import ROOT, captured
from data_files import put_json, put_lines, spelled, table
from hub import Fault, serving
from keepmtp.checkpoints.source import Source, open_source
from keepmtp.quantize.calibrate.data import data as module
from keepmtp.quantize.calibrate.data import tokenize
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data, portions
from keepmtp.quantize.calibrate.mtp.facts import DataFact
from keepmtp.recipes.errors import KeepMTPError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Calibration, TextsOfMix
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(400)]
EOS = 1
USER = 2
ASSISTANT = 3
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content "
    "}}{% if turn.name is defined %}!{% endif %}{% endfor %}<eos>"
)


@pytest.fixture
def source(tmp_path) -> Source:
    """A checkpoint with a tokenizer in which every word is one token: `w7` is 4 + 7."""
    folder = tmp_path / "checkpoint"
    vocabulary = {"<unk>": 0, "<eos>": EOS, "<user>": USER, "<assistant>": ASSISTANT}
    vocabulary |= {word: number for number, word in enumerate(WORDS, start=4)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = ["<user>", "<assistant>"]
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=special,
    ).save_pretrained(folder)
    config = {"model_type": "glm4_moe", "vocab_size": 404, "max_position_embeddings": 64}
    put_json(folder / "config.json", config)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return open_source(folder)


def with_template(source: Source, text: str = TEMPLATE) -> Source:
    (source.folder / "chat_template.jinja").write_text(text)
    return source


LOCAL = {"dataset_revision": "local", "split": "train", "column": "text"}


def calibration(place: Path | str, **changes) -> Calibration:
    given = {
        "algorithm": "minmax",
        "dataset": str(place),
        **LOCAL,
        "samples": 4,
        "held_out": 3,
        "sequence_length": 8,
        "batch_size": 2,
        "seed": 0,
    }
    return Calibration.model_validate(given | changes)


def write(path: Path, rows: list, column: str = "text") -> Path:
    """Rows of one column, or rows as they are."""
    rows = [row if isinstance(row, dict) else {column: row} for row in rows]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        put_lines(path, rows)
    return path


def texts(count: int = 40) -> list[str]:
    """Row n says the words 5n to 5n + 4: every token tells its row."""
    return [" ".join(WORDS[5 * number : 5 * number + 5]) for number in range(count)]


@pytest.fixture
def rows(tmp_path) -> Path:
    return write(tmp_path / "rows.jsonl", texts())


def rows_of(ids: torch.Tensor) -> list[int]:
    """The rows that packed ids come from, in order."""
    return list(dict.fromkeys((token - 4) // 5 for token in ids.flatten().tolist() if token >= 4))


def refusal(given: Calibration, source: Source) -> str:
    with pytest.raises(KeepMTPError) as caught:
        calibration_data(given, source)
    message = str(caught.value)
    assert "; got " in message and message[-1] in ".?" and "\n" not in message, "the house form"
    return message


def assert_same_ids(one: CalibrationData, other: CalibrationData) -> None:
    assert torch.equal(one.ids, other.ids) and torch.equal(one.held_out_ids, other.held_out_ids)


# --- what is drawn --------------------------------------------------------------------------------


def test_rows_lie_end_to_end_in_one_order_for_good(rows, source):
    """A changed draw would make every published recipe mean another text."""
    made = calibration_data(calibration(rows), source)
    drawn = [0, 27, 12, 21, 29, 15]
    assert rows_of(made.ids) == drawn
    assert made.ids.dtype == made.held_out_ids.dtype == torch.int64
    expected = [token for row in drawn for token in (*range(4 + 5 * row, 9 + 5 * row), EOS)]
    assert torch.equal(made.ids, torch.tensor(expected[:32]).view(4, 8))
    assert made.held_out_ids.shape == (3, 8) and made.held_out_ids[0, 0] % 5 == 4
    assert not {*drawn} & {*rows_of(made.held_out_ids)}
    assert made.provenance["rows"] == -(-32 // 6) and made.provenance["tokens"] == 32
    other = calibration_data(calibration(rows, seed=1), source)
    assert rows_of(other.ids) != drawn
    assert other.provenance["ids_sha256"] != made.provenance["ids_sha256"]


def test_a_row_further_on_than_a_window_comes_after_it(rows, source, monkeypatch):
    monkeypatch.setattr(module, "SHUFFLED_ROWS", 4)
    drawn = rows_of(calibration_data(calibration(rows), source).ids)
    assert sorted(drawn[:4]) == [0, 1, 2, 3] != drawn[:4] and {4, 5} >= {*drawn[4:]} - {6, 7}


def test_parquet_json_lines_and_a_folder_give_the_same_ids(rows, tmp_path, source):
    expected = calibration_data(calibration(rows), source)
    folder = tmp_path / "folder" / "data"
    folder.mkdir(parents=True)
    for number, part in enumerate((texts()[:13], texts()[13:])):  # one split cut into two files
        write(folder / f"train-{number:05d}-of-00002.parquet", part)
    for place in (write(tmp_path / "rows.parquet", texts()), folder.parent):
        made = calibration_data(calibration(place), source)
        assert_same_ids(made, expected)
        assert {**made.provenance, "dataset": ""} == {**expected.provenance, "dataset": ""}


def test_a_repeated_row_is_not_held_out_either(tmp_path, source):
    often = write(tmp_path / "often.jsonl", texts(9) * 40)
    made = calibration_data(calibration(often, held_out=20), source)
    assert not {*rows_of(made.ids)} & {*rows_of(made.held_out_ids)}


def test_a_longer_row_is_cut_into_sequences(tmp_path, source):
    place = write(tmp_path / "long.jsonl", [" ".join(WORDS), " ".join(WORDS[:60])])
    made = calibration_data(calibration(place, samples=6, held_out=1), source)
    assert torch.equal(made.ids.flatten(), torch.arange(4, 52)), "it goes on in the next sequence"


def test_blank_rows_are_passed_over_and_counted(tmp_path, source):
    blanks = [text for row in texts() for text in (row, "", "  \n")]
    made = calibration_data(calibration(write(tmp_path / "blank.jsonl", blanks)), source)
    assert made.provenance["blank_rows"] > 0 and 0 not in made.ids


# --- conversations --------------------------------------------------------------------------------


def conversations() -> list[list[dict]]:
    """In Parquet every turn has every key, as None; a template asks `if turn.name is defined`."""
    return [
        [
            {"role": "user", "content": f" w{n} w{n + 1} ", "name": None},
            {"role": "assistant", "content": f" w{n + 2} "},
        ]
        for n in range(0, 200, 5)
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_conversation_goes_through_the_chat_template(tmp_path, source, suffix):
    place = write(tmp_path / f"chat{suffix}", conversations())
    made = calibration_data(calibration(place), with_template(source))
    first = 4 + 5 * rows_of(made.ids)[0]
    assert made.ids[0, :6].tolist() == [USER, first, first + 1, ASSISTANT, first + 2, EOS]
    assert 0 not in made.ids


# --- what a model writes --------------------------------------------------------------------------

CHATML = (
    "{% for turn in messages %}<{{ turn.role }}> {{ turn.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def talks() -> list[list[dict[str, str]]]:
    """System, user, assistant, user, assistant: words under 100 are never an answer's, those over
    100 always are.
    """
    turns = (("system", 0), ("user", 20), ("assistant", 100), ("user", 40), ("assistant", 200))
    return [
        [{"role": role, "content": f"w{n + at} w{n + at + 1}"} for role, at in turns]
        for n in range(1, 41)
    ]


def answers(ids: torch.Tensor, above: int = 100) -> torch.Tensor:
    """By the words alone: an answer's words, and the end behind them."""
    is_word = ids >= 4 + above
    ends = (ids[..., 1:] == EOS) & is_word[..., :-1]
    return torch.cat([is_word[..., :1], is_word[..., 1:] | ends], -1)


def talked(tmp_path: Path, **changes) -> Calibration:
    return calibration(write(tmp_path / "chat.jsonl", talks()), **{"held_out": 9} | changes)


def asked(tmp_path: Path) -> Path:
    """Rows with a question and an answer apart, of words from `w200` on."""
    rows = [{"query": f"w{n} w{n}", "text": f"w{n + 100} w{n + 100}"} for n in range(200, 240)]
    return write(tmp_path / "asked.jsonl", rows)


def test_a_question_and_its_answer_become_two_turns(tmp_path, source):
    chat = calibration(asked(tmp_path), prompt_column="query", chat=True)
    made = calibration_data(chat, with_template(source, CHATML))
    assert made.held_out_ids[:, 0].tolist() == [USER] * 3
    assert made.held_out_ids[:, 4].tolist() == [ASSISTANT] * 3
    assert made.held_out_written.tolist() == [[False] * 5 + [True] * 3] * 3, "and its end"
    with pytest.raises(ValueError, match=r"chat needs a prompt_column; got none\. Name it, or"):
        calibration("place", chat=True)


def test_a_mix_is_each_dataset_by_its_share(rows, tmp_path, source):
    """Every sequence is of one dataset, and both datasets are spread over the whole."""
    other = str(asked(tmp_path))
    words = {"dataset": other, **LOCAL, "prompt_column": "query", "chat": True}
    mixed = calibration(rows, samples=8, held_out=4, also=({"share": 0.25, **words},))
    made = calibration_data(mixed, with_template(source, CHATML))
    alone = calibration_data(calibration(rows, samples=6), source)
    is_other = (made.ids >= 4 + 200).any(-1)
    assert is_other.nonzero().flatten().tolist() == [2, 6]
    assert torch.equal(made.ids[~is_other], alone.ids), "each gives what it would give alone"
    assert made.held_out_ids.shape == (4, 8) and made.held_out_written.any()
    (told,) = DataFact.model_validate(made.provenance).also
    assert (told.dataset, told.share, told.prompt_column) == (other, 0.25, "query")
    assert made.provenance["rows"] > alone.provenance["rows"]
    said = refusal(mixed.model_copy(update={"samples": 4000}), source)
    assert "must hold 3000 + 3 sequences of 8 tokens (samples + held_out)" in said


def test_plain_text_beside_answers_does_not_count(rows, tmp_path, source):
    """What nothing says of its rows."""
    chat = calibration(asked(tmp_path), prompt_column="query", chat=True)
    plain = {"dataset": str(rows), **LOCAL}
    mixed = chat.model_copy(update={"also": (TextsOfMix(share=0.5, **plain),), "held_out": 4})
    made = calibration_data(mixed, with_template(source, CHATML))
    assert made.held_out_written.any()
    assert not made.held_out_written[made.rows_of_kinds[plain["dataset"]]].any()


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.25, 0.75, 0.3)])
def test_a_mix_that_leaves_nothing_for_the_first_is_refused(shares):
    rule = "the shares in also must leave some for the first dataset; got 1"
    also = tuple({"share": share, "dataset": "place", **LOCAL} for share in shares)
    with pytest.raises(ValueError, match=rule):
        calibration("place", also=also)


def test_portions_are_whole_and_lose_nothing():
    assert portions(512, [0.25] * 4) == [128] * 4
    assert portions(10, [0.55, 0.25, 0.2]) == [6, 2, 2] and sum(portions(7, [0.3, 0.3, 0.4])) == 7
    assert portions(1, [0.5, 0.5]) == [1, 0]


# A conversation is 20 tokens long: cut, or with another behind it.
@pytest.mark.parametrize("length", [18, 26])
def test_answers_are_told_from_what_was_asked(tmp_path, source, length):
    chat = talked(tmp_path, held_out=8, sequence_length=length)
    made = calibration_data(chat, with_template(source, CHATML))
    written = made.held_out_written
    assert written.dtype == torch.bool and written.shape == made.held_out_ids.shape == (8, length)
    expected = answers(made.held_out_ids)
    expected[:, 20:] = False  # behind another conversation
    assert torch.equal(written, expected)
    assert 0 < written.sum() == made.provenance["held_out_written_tokens"] < written.numel()


OWN_ENCODING = """
def encode_messages(messages, thinking_mode, context=None):
    assert thinking_mode == "chat"
    text = "".join(f"<{turn['role']}> {turn['content']} <eos> " for turn in messages)
    return text + "<assistant> " * (messages[-1]["role"] == "user")
"""


@pytest.fixture
def own(source) -> Path:
    """An encoding of the checkpoint's own, in place of a template."""
    path = source.folder / "encoding" / "encoding_own.py"
    path.parent.mkdir()
    path.write_text(OWN_ENCODING)
    return path


def test_the_checkpoints_own_encoding_runs_only_where_the_recipe_says_so(tmp_path, source, own):
    chat = talked(tmp_path)
    message = refusal(chat, source)
    assert "got encoding/encoding_own.py, which is the checkpoint's code" in message
    assert "calibration.model_code: checkpoint" in message
    own.unlink()
    for given in (chat, chat.model_copy(update={"model_code": "checkpoint"})):
        message = refusal(given, source)
        assert "must have a chat template to calibrate on conversations; got none" in message
        assert "chat_template.jinja" in message and "column of texts" in message


@pytest.mark.usefixtures("child")
def test_the_checkpoints_own_encoding_tells_answers_as_a_template_does(tmp_path, source, own):
    chat = talked(tmp_path)
    allowed = chat.model_copy(update={"model_code": "checkpoint"})
    made = calibration_data(allowed, source)
    own.write_text("")
    assert "chat format; got 'encode_messages'" in refusal(allowed, source)
    expected = calibration_data(chat, with_template(source, CHATML))
    assert_same_ids(made, expected)
    assert torch.equal(made.held_out_written, expected.held_out_written)


TEMPLATES = {
    # What comes behind an answer is the next turn.
    "ends texts, not turns": (
        CHATML.replace("<eos> {% endfor", "{% endfor").replace(
            "{% endif %}", "{% else %}<eos>{% endif %}"
        ),
        lambda ids: (ids >= 4 + 100) | (ids == EOS),
    ),
    # What a server is given is not how the text goes on.
    "begins answers otherwise": (
        CHATML.replace("<assistant> {% endif", "<assistant> w399 {% endif"),
        lambda ids: ids < 0,
    ),
    # As Qwen3's: the last answer has what earlier ones lack.
    "shows earlier answers otherwise": (
        CHATML.replace(
            "{{ turn.content }}",
            "{% if loop.last and turn.role == 'assistant' %}w399 {% endif %}{{ turn.content }}",
        ),
        lambda ids: answers(ids, 200),
    ),
    "takes no part of a conversation": (
        "{% if messages | length < 5 %}{{ raise_exception('more') }}{% endif %}" + CHATML,
        lambda ids: ids < 0,
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_marks(name, tmp_path, source):
    template, expected = TEMPLATES[name]
    made = calibration_data(talked(tmp_path), with_template(source, template))
    ids = made.held_out_ids.flatten()
    written = made.held_out_written.flatten()
    assert torch.equal(written, expected(ids))
    assert made.provenance["held_out_written_tokens"] == written.sum()


@pytest.mark.parametrize("is_within", [True, False])
def test_a_text_behind_a_prompt(is_within, rows, tmp_path, source):
    """Two words of each row are asked; a token that begins in the prompt is the user's."""
    answered = []
    for text in texts():
        at = text.index(" ") + 2
        if not is_within:
            at = text.index(" ", at)
        answered.append({"asked": text[:at], "text": text[at:]})
    plain = calibration_data(calibration(rows), source)
    assert plain.held_out_written is None and "held_out_written_tokens" not in plain.provenance
    place = write(tmp_path / "answered.jsonl", answered)
    made = calibration_data(calibration(place, prompt_column="asked"), source)
    assert_same_ids(made, plain)
    expected = (made.held_out_ids == EOS) | ((made.held_out_ids - 4) % 5 >= 2)
    assert torch.equal(made.held_out_written, expected)
    assert made.provenance["prompt_column"] == "asked"


@pytest.mark.usefixtures("child")
def test_the_shipped_text_begins_to_count_behind_its_questions():
    recipe = find_recipe("tiny-glm4-moe.nvfp4")[0]
    source = open_source(ROOT / recipe.source)
    made = calibration_data(recipe.calibration, source)
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    for ids, written in zip(made.held_out_ids, made.held_out_written, strict=True):
        first = tokenizer.decode(ids).split("<eos>")[0]
        answer = tokenizer.decode(ids[written])
        assert answer.removesuffix("<eos>") == first.partition("Answer:")[2]
    # The ids that runs were made with before texts were told apart.
    assert made.provenance["ids_sha256"].startswith("93f954711f17a8f6")


# --- what is refused ------------------------------------------------------------------------------


REFUSED = table("quantize/calibrate/data/refused_data")


@pytest.mark.parametrize("case", REFUSED, ids=itemgetter("says"))
def test_what_is_refused(case, rows, source, monkeypatch):
    monkeypatch.setattr(module, "SHUFFLED_ROWS", 10**9)
    if "text" in case:
        rows = rows.with_suffix(case.get("suffix", ".jsonl"))
        rows.write_text('{"text": "w1"}\n' * case.get("after", 0) + case["text"])
    given = calibration(rows, **case.get("given", {}))
    message = refusal(given, source)
    assert case["says"] in message and message.startswith("calibration.")


@pytest.mark.usefixtures("child")
def test_a_tokenizer_that_does_not_fit_its_model(rows, source):
    def said(**config) -> str:
        config = dict(source.config) | config
        return refusal(calibration(rows), replace(source, config=config))

    assert "ids must be below the model's vocab_size, " in said(vocab_size=100)
    for pattern in ("tokenizer.json", "tokenizer*"):
        for path in source.folder.glob(pattern):
            path.unlink()
        assert "the model's tokenizer beside the weights; got " in said()


@pytest.mark.usefixtures("child")
def test_a_conversation_that_the_template_does_not_allow(tmp_path, source):
    template = "{{ raise_exception('roles must alternate') }}"
    message = refusal(talked(tmp_path), with_template(source, template))
    assert "must suit the model's chat format; got roles must alternate" in message


def test_a_hub_without_the_dataset_and_one_that_cannot_be_reached(
    tmp_path, source, serve_hub, hub_at
):
    given = calibration("org/data", dataset_revision="main")
    serve_hub(tmp_path)
    rule = "calibration.dataset org/data: must be a dataset on the Hub, or a file or folder"
    assert refusal(given, source).startswith(rule)
    said = {"X-Error-Message": "Invalid credentials in Authorization header"}
    with serving(tmp_path / "hub") as hub:
        hub_at(hub.endpoint)
        hub.faults.append(Fault("org/data", 401, times=9, headers=said))
        message = refusal(given, source)
    assert "the Hub must let this machine read it; got " in message
    assert "Run `hf auth login`" in message and "network" not in message
    hub_at("http://127.0.0.1:9")  # the discard port, where nobody listens
    message = refusal(given, source)
    assert message.startswith("calibration.dataset org/data: the Hub must be reachable; got ")
    assert "Check the network; or where the Hub is reachable run `hf download " in message


# Another process: datasets and huggingface_hub read where the Hub is when they are imported.
IN_ANOTHER_PROCESS = """
import json, sys
from keepmtp.quantize.calibrate.data.data import calibration_data
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.blocks import Calibration, Texts, TextsOfMix
for changes in ({}, {"split": "test"}, {"column": "txt"}, {"subset": "small"}):
    try:
        made = calibration_data(Calibration.model_validate_json(sys.argv[1]).model_copy(update=changes),
                                open_source(sys.argv[2]))
        print(json.dumps(dict(made.provenance)))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


@pytest.mark.full
def test_a_hub_dataset_is_streamed_and_gives_the_ids_of_a_local_copy(tmp_path, source):
    repository = tmp_path / "repository"
    (repository / "data").mkdir(parents=True)
    copy = write(repository / "data" / "train-00000-of-00001.parquet", texts())
    given = calibration("org/data", dataset_revision="main").model_dump_json()
    with serving(tmp_path / "hub") as hub:
        commit = hub.mirror("datasets/org/data", repository)
        told = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        code = [sys.executable, "-c", IN_ANOTHER_PROCESS, given, str(source.folder)]
        done = captured(code, env=os.environ | told, timeout=120, status=0)
    provenance, no_split, no_column, no_subset = map(json.loads, done.stdout.splitlines())
    assert provenance["dataset_revision"] == commit
    local = dict(calibration_data(calibration(copy), source).provenance)
    assert provenance == local | {"dataset": "org/data", "dataset_revision": commit}
    assert "split must be one of train; got 'test'" in no_split
    assert "column must be one of text; got 'txt'" in no_column
    assert "calibration.subset" in no_subset and "default" in no_subset, "names what there is"


HOSTILE = table("quantize/calibrate/data/hostile_tokenizers")


@pytest.mark.usefixtures("child")
@pytest.mark.parametrize("case", HOSTILE, ids=itemgetter("says"))
def test_a_tokenizer_or_template_of_a_stranger(case, tmp_path, source, monkeypatch):
    """Whatever it does, it is done in a process with limits, and one sentence is said of it."""
    monkeypatch.setattr(tokenize, "SECONDS", case.get("seconds", 60))
    monkeypatch.setattr(tokenize, "MOST_BYTES", 1 << 29)
    text = spelled(case["text"])
    (source.folder / case.get("file", "chat_template.jinja")).write_text(text)
    assert f"; got {case['says']}" in refusal(talked(tmp_path), source)
