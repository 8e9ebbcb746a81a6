"""Calibration text: the same ids every time, nothing held out that was calibrated on, and what is
refused and how.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hub import serving
from keepmtp.checkpoints.source import Source, open_source
from keepmtp.quantize.calibrate.data import data as module
from keepmtp.quantize.calibrate.data.data import CalibrationData, calibration_data, portions
from keepmtp.quantize.calibrate.mtp.facts import DataFact
from keepmtp.recipes.errors import CheckpointError, RecipeError
from keepmtp.recipes.find import find_recipe
from keepmtp.recipes.schema import Calibration
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

WORDS = [f"w{number}" for number in range(400)]
EOS, USER, ASSISTANT = 1, 2, 3
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content "
    "}}{% if turn.name %}!{% endif %}{% endfor %}<eos>"
)


@pytest.fixture
def source(tmp_path) -> Source:
    """A checkpoint with a tokenizer in which every word is one token: `w7` is 4 + 7."""
    return make_source(tmp_path / "checkpoint")


def make_source(folder: Path, *, vocab_size: int = 404, **config) -> Source:
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
    config = {
        "model_type": "glm4_moe",
        "vocab_size": vocab_size,
        "max_position_embeddings": 64,
    } | config
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return open_source(folder)


def with_template(source: Source, text: str = TEMPLATE) -> Source:
    (source.folder / "chat_template.jinja").write_text(text)
    return source


def calibration(place: Path | str, **changes) -> Calibration:
    given = {
        "algorithm": "minmax",
        "dataset": str(place),
        "dataset_revision": "local",
        "split": "train",
        "column": "text",
        "samples": 4,
        "held_out": 3,
        "sequence_length": 8,
        "batch_size": 2,
        "seed": 0,
    }
    return Calibration.model_validate(given | changes)


def write(path: Path, rows: list, column: str = "text") -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"number": list(range(len(rows))), column: rows}), path)
    else:
        path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows))
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


def refusal(run: Callable[[], CalibrationData], kind: type[Exception] = RecipeError) -> str:
    with pytest.raises(kind) as caught:
        run()
    message = str(caught.value)
    assert "; got " in message and message[-1] in ".?" and "\n" not in message, (
        "the house form of a refusal"
    )
    return message


# --- what is drawn --------------------------------------------------------------------------------


def test_rows_lie_end_to_end_without_padding(rows, source):
    made = calibration_data(calibration(rows), source)
    assert (made.ids.shape, made.held_out_ids.shape) == ((4, 8), (3, 8))
    assert made.ids.dtype == made.held_out_ids.dtype == torch.int64
    expected = [
        token for row in rows_of(made.ids) for token in (*range(4 + 5 * row, 9 + 5 * row), EOS)
    ]
    assert made.ids.flatten().tolist() == expected[:32]
    assert made.provenance["rows"] == -(-32 // 6) and made.provenance["tokens"] == 32


def test_the_same_ids_every_time_and_others_with_another_seed(rows, source):
    first, second = (calibration_data(calibration(rows), source) for _ in range(2))
    assert torch.equal(first.ids, second.ids) and torch.equal(
        first.held_out_ids, second.held_out_ids
    )
    assert first.provenance == second.provenance
    other = calibration_data(calibration(rows, seed=1), source)
    assert rows_of(other.ids) != rows_of(first.ids)
    assert other.provenance["ids_sha256"] != first.provenance["ids_sha256"]


def test_the_order_is_drawn_not_the_files(rows, source):
    drawn = rows_of(calibration_data(calibration(rows), source).ids)
    assert drawn != sorted(drawn)


def test_the_order_is_fixed_for_good(rows, source):
    """A changed draw would make every published recipe mean another text."""
    assert rows_of(calibration_data(calibration(rows), source).ids) == [0, 27, 12, 21, 29, 15]


def test_a_row_further_on_than_a_window_comes_after_it(rows, source, monkeypatch):
    monkeypatch.setattr(module, "SHUFFLED_ROWS", 4)
    made = calibration_data(calibration(rows), source)
    drawn = rows_of(made.ids)
    assert sorted(drawn[:4]) == [0, 1, 2, 3] and {4, 5} >= set(drawn[4:]) - {6, 7}
    assert drawn[:4] != [0, 1, 2, 3]


def test_parquet_json_lines_and_a_folder_give_the_same_ids(rows, tmp_path, source):
    expected = calibration_data(calibration(rows), source)
    folder = tmp_path / "folder" / "data"
    folder.mkdir(parents=True)
    for start in (0, 13):  # one split cut into two files
        part = texts()[:13] if start == 0 else texts()[13:]
        write(folder / f"train-{start:05d}-of-00002.parquet", part)
    for place in (write(tmp_path / "rows.parquet", texts()), folder.parent):
        made = calibration_data(calibration(place), source)
        assert torch.equal(made.ids, expected.ids) and torch.equal(
            made.held_out_ids, expected.held_out_ids
        )
        assert {**made.provenance, "dataset": ""} == {**expected.provenance, "dataset": ""}


def test_nothing_is_held_out_that_was_calibrated_on(rows, source):
    made = calibration_data(calibration(rows), source)
    assert not set(rows_of(made.ids)) & set(rows_of(made.held_out_ids))
    assert made.held_out_ids[0, 0] % 5 == 4, "held-out text begins with a row, not within one"


def test_a_repeated_row_is_not_held_out_either(tmp_path, source):
    often = write(tmp_path / "often.jsonl", texts(9) * 40)
    made = calibration_data(calibration(often, held_out=20), source)
    assert not set(rows_of(made.ids)) & set(rows_of(made.held_out_ids))


def test_a_longer_row_is_cut_into_sequences(tmp_path, source):
    made = calibration_data(
        calibration(
            write(tmp_path / "long.jsonl", [" ".join(WORDS), " ".join(WORDS[:60])]),
            samples=6,
            held_out=1,
        ),
        source,
    )
    flat = made.ids.flatten()
    assert torch.equal(flat, torch.arange(4, 52)), "the row goes on in the next sequence"


def test_one_character_changes_the_sum(rows, source):
    before = calibration_data(calibration(rows), source).provenance
    row = rows_of(calibration_data(calibration(rows), source).ids)[0]
    lines = rows.read_text().splitlines()
    lines[row] = lines[row].replace(f"w{5 * row} ", f"w{5 * row}0 " if row else "w1 ")
    rows.write_text("\n".join(lines))
    after = calibration_data(calibration(rows), source).provenance
    assert before["ids_sha256"] != after["ids_sha256"]
    assert before["held_out_ids_sha256"] == after["held_out_ids_sha256"]
    assert before["row_numbers_sha256"] == after["row_numbers_sha256"]


def test_blank_rows_are_passed_over_and_counted(tmp_path, source):
    blanks = [text for row in texts() for text in (row, "", "  \n")]
    made = calibration_data(calibration(write(tmp_path / "blank.jsonl", blanks)), source)
    assert made.provenance["blank_rows"] > 0
    assert 0 not in made.ids


def test_relative_names_are_found_beside_the_package_too(tmp_path, monkeypatch):
    recipe = find_recipe("tiny-qwen3_5.nvfp4")[0]
    source = open_source(Path(__file__).parents[3] / recipe.source)
    here = calibration_data(recipe.calibration, source)
    monkeypatch.chdir(tmp_path)
    assert calibration_data(recipe.calibration, source).provenance == here.provenance


# --- conversations --------------------------------------------------------------------------------


def conversations(count: int = 40) -> list[list[dict[str, str]]]:
    return [
        [
            {"role": "user", "content": f" w{5 * n} w{5 * n + 1} "},
            {"role": "assistant", "content": f" w{5 * n + 2} "},
        ]
        for n in range(count)
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_conversation_goes_through_the_chat_template(tmp_path, source, suffix):
    place = write(tmp_path / f"chat{suffix}", conversations(), "messages")
    made = calibration_data(calibration(place, column="messages"), with_template(source))
    row = rows_of(made.ids)[0]
    first = 4 + 5 * row
    assert made.ids[0, :6].tolist() == [USER, first, first + 1, ASSISTANT, first + 2, EOS]


def test_a_key_that_only_other_turns_have_is_not_seen_by_the_template(tmp_path, source):
    """In Parquet every turn has every key, as None; a template asks `if turn.name is defined`."""
    rows = [[turn | {"name": None} for turn in row] for row in conversations()]
    template = TEMPLATE.replace("{% if turn.name %}", "{% if turn.name is defined %}")
    made = calibration_data(
        calibration(write(tmp_path / "chat.parquet", rows, "messages"), column="messages"),
        with_template(source, template),
    )
    assert 0 not in made.ids


OWN_ENCODING = """
def encode_messages(messages, thinking_mode, context=None):
    assert thinking_mode == "chat"
    return " ".join("<" + turn["role"] + ">" + turn["content"] for turn in messages) + " <eos>"
"""


def test_the_checkpoints_own_encoding_runs_only_where_the_recipe_says_so(tmp_path, source):
    chat = calibration(
        write(tmp_path / "chat.jsonl", conversations(), "messages"), column="messages"
    )
    message = refusal(lambda: calibration_data(chat, source), CheckpointError)
    assert "must have a chat template to calibrate on conversations; got none" in message
    assert "chat_template.jinja" in message and "column of texts" in message

    (source.folder / "encoding").mkdir()
    (source.folder / "encoding" / "encoding_own.py").write_text(OWN_ENCODING)
    message = refusal(lambda: calibration_data(chat, source))
    assert "got encoding/encoding_own.py, which is the checkpoint's code" in message
    assert "calibration.model_code: checkpoint" in message

    allowed = chat.model_copy(update={"model_code": "checkpoint"})
    own = calibration_data(allowed, source)
    assert torch.equal(own.ids, calibration_data(allowed, with_template(source)).ids), (
        "encoded as by the template"
    )

    (source.folder / "chat_template.jinja").unlink()
    (source.folder / "encoding" / "encoding_own.py").write_text("")
    assert "must have a function encode_messages" in refusal(
        lambda: calibration_data(allowed, source), CheckpointError
    )


def test_a_conversation_that_the_template_does_not_allow(tmp_path, source):
    template = "{{ raise_exception('roles must alternate') }}"
    chat = calibration(
        write(tmp_path / "chat.jsonl", conversations(1), "messages"), column="messages"
    )
    message = refusal(lambda: calibration_data(chat, with_template(source, template)))
    assert "row 0: must suit the model's chat format; got roles must alternate" in message


# --- what a model writes --------------------------------------------------------------------------

CHATML = (
    "{% for turn in messages %}<{{ turn.role }}> {{ turn.content }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
THOUGHT = CHATML.replace(
    "{{ turn.content }}",
    "{% if loop.last and turn.role == 'assistant' %}w0 {% endif %}{{ turn.content }}",
)
"""As Qwen3's: the last answer has what earlier ones lack."""


def talks(count: int = 40) -> list[list[dict[str, str]]]:
    """System, user, assistant, user, assistant: words under 100 are never an answer's, those over
    100 always are.
    """
    return [
        [
            {"role": role, "content": f"w{n + offset} w{n + offset + 1}"}
            for role, offset in (
                ("system", 0),
                ("user", 20),
                ("assistant", 100),
                ("user", 40),
                ("assistant", 200),
            )
        ]
        for n in range(1, count + 1)
    ]


def answers(ids: torch.Tensor) -> torch.Tensor:
    """By the words alone: an answer's words, and the end behind them."""
    is_word = ids >= 4 + 100
    ends = (ids[1:] == EOS) & is_word[:-1]
    return torch.cat([is_word[:1], is_word[1:] | ends])


def asked(path: Path, count: int = 40) -> Path:
    """Rows with a question and an answer apart, of words from `w200` on."""
    rows = [
        {"query": f"w{200 + n} w{200 + n}", "answer": f"w{300 + n} w{300 + n}"}
        for n in range(count)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_question_and_its_answer_become_two_turns(tmp_path, source):
    place = asked(tmp_path / "asked.jsonl")
    chat = calibration(place, column="answer", prompt_column="query", chat=True)
    made = calibration_data(chat, with_template(source, CHATML))
    assert (
        made.held_out_ids[:, 0].tolist() == [USER] * 3
        and made.held_out_ids[:, 4].tolist() == [ASSISTANT] * 3
    )
    assert made.held_out_written.tolist() == [[False] * 5 + [True] * 3] * 3, (
        "the answer and its end"
    )
    with pytest.raises(
        ValueError, match=r"chat needs a prompt_column; got none\. Name it, or leave out chat"
    ):
        calibration(place, column="answer", chat=True)


def test_a_mix_is_each_dataset_by_its_share(tmp_path, source):
    """Every sequence is of one dataset, and both datasets are spread over the whole."""
    place, other = write(tmp_path / "rows.jsonl", texts()), asked(tmp_path / "asked.jsonl")
    words = {
        "dataset": str(other),
        "dataset_revision": "local",
        "split": "train",
        "column": "answer",
    }
    also = ({"share": 0.25, **words, "prompt_column": "query", "chat": True},)
    mixed = calibration(place, samples=8, held_out=4, also=also)
    made = calibration_data(mixed, with_template(source, CHATML))
    alone = calibration_data(calibration(place, samples=6, held_out=3), source)
    is_other = [bool((ids >= 4 + 200).any()) for ids in made.ids]
    assert [number for number, each in enumerate(is_other) if each] == [2, 6]
    assert torch.equal(made.ids[~torch.tensor(is_other)], alone.ids), (
        "each dataset gives what it would give alone"
    )
    assert made.held_out_ids.shape == (4, 8) and made.held_out_written.any()
    (told,) = DataFact.model_validate(made.provenance).also
    assert (told.dataset, told.share, told.prompt_column) == (str(other), 0.25, "query")
    assert made.provenance["rows"] > alone.provenance["rows"]
    said = refusal(lambda: calibration_data(mixed.model_copy(update={"samples": 4000}), source))
    assert "must hold 3000 + 3 sequences of 8 tokens (its share of samples + held_out)" in said


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.25, 0.75, 0.3)])
def test_a_mix_that_leaves_nothing_for_the_first_is_refused(rows, shares):
    words = {"dataset": str(rows), "dataset_revision": "local", "split": "train", "column": "text"}
    with pytest.raises(
        ValueError, match="the shares in also must leave some for the first dataset; got 1"
    ):
        calibration(rows, also=tuple({"share": share, **words} for share in shares))


def test_portions_are_whole_and_lose_nothing():
    assert portions(512, [0.25] * 4) == [128] * 4
    assert portions(10, [0.55, 0.25, 0.2]) == [6, 2, 2] and sum(portions(7, [0.3, 0.3, 0.4])) == 7
    assert portions(1, [0.5, 0.5]) == [1, 0]


@pytest.mark.parametrize(
    "length", [18, 26]
)  # a conversation is 20 tokens long: cut, or with another behind it
def test_answers_are_told_from_what_was_asked(tmp_path, source, length):
    place = write(tmp_path / "chat.jsonl", talks(), "messages")
    chat = calibration(place, column="messages", held_out=8, sequence_length=length)
    made = calibration_data(chat, with_template(source, CHATML))
    written = made.held_out_written
    assert written.dtype == torch.bool and written.shape == made.held_out_ids.shape == (8, length)
    expected = torch.stack([answers(row) for row in made.held_out_ids])
    expected[:, 20:] = False  # behind another conversation
    assert torch.equal(written, expected)
    assert 0 < written.sum() == made.provenance["held_out_written_tokens"] < written.numel()


def test_an_end_that_only_a_whole_conversation_has_is_the_last_answers(tmp_path, source):
    """A template that ends texts, not turns: what comes behind an answer is the next turn."""
    template = (
        "{% for turn in messages %}<{{ turn.role }}> {{ turn.content }} {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% else %}<eos>{% endif %}"
    )
    chat = calibration(
        write(tmp_path / "chat.jsonl", talks(), "messages"), column="messages", held_out=9
    )
    made = calibration_data(chat, with_template(source, template))
    ids, written = made.held_out_ids.flatten(), made.held_out_written.flatten()
    assert torch.equal(written, (ids >= 4 + 100) | (ids == EOS))


def test_a_template_that_begins_answers_otherwise_marks_nothing(tmp_path, source):
    """The twin: what a server is given is not how the text goes on."""
    chat = calibration(
        write(tmp_path / "chat.jsonl", talks(), "messages"), column="messages", sequence_length=20
    )
    template = CHATML.replace("<assistant> {% endif", "<assistant> w399 {% endif")
    made = calibration_data(chat, with_template(source, template))
    assert made.held_out_written.sum() == 0 == made.provenance["held_out_written_tokens"]
    good = calibration_data(chat, with_template(source, CHATML))
    assert torch.equal(made.held_out_ids, good.held_out_ids) and good.held_out_written.any()


def test_an_earlier_answer_that_a_template_shows_otherwise_does_not_count(tmp_path, source):
    chat = calibration(
        write(tmp_path / "chat.jsonl", talks(), "messages"), column="messages", held_out=9
    )
    made = calibration_data(chat, with_template(source, THOUGHT))
    ids, written = made.held_out_ids.flatten(), made.held_out_written.flatten()
    assert not written[(ids >= 4 + 100) & (ids < 4 + 200)].any()
    assert written[ids >= 4 + 200].all(), "the last answer stands as it was asked for"


def test_a_template_that_takes_no_part_of_a_conversation_marks_nothing_of_it(tmp_path, source):
    chat = calibration(write(tmp_path / "chat.jsonl", talks(), "messages"), column="messages")
    template = "{% if messages | length < 5 %}{{ raise_exception('more') }}{% endif %}" + CHATML
    assert not calibration_data(chat, with_template(source, template)).held_out_written.any()


OWN_TURNS = """
def encode_messages(messages, thinking_mode, context=None):
    said = {"user": "<user> {} <assistant>", "assistant": "{} <eos>", "system": "{}"}
    return " ".join(said[turn["role"]].format(turn["content"]) for turn in messages)
"""


def test_the_checkpoints_own_encoding_tells_answers_too(tmp_path, source):
    (source.folder / "encoding").mkdir()
    (source.folder / "encoding" / "encoding_own.py").write_text(OWN_TURNS)
    place = write(tmp_path / "chat.jsonl", talks(), "messages")
    made = calibration_data(
        calibration(place, column="messages", held_out=9, model_code="checkpoint"), source
    )
    assert torch.equal(made.held_out_written.flatten(), answers(made.held_out_ids.flatten()))


def answered(place: Path, texts: list[str], cut: Callable[[str], int]) -> Path:
    rows = [{"asked": text[: cut(text)], "text": text[cut(text) :]} for text in texts]
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def test_a_text_behind_a_prompt(rows, tmp_path, source):
    """Two words of each row are asked; the space before the third is the answer's."""
    place = answered(
        tmp_path / "answered.jsonl", texts(), lambda text: text.index(" ", text.index(" ") + 1)
    )
    plain = calibration_data(calibration(rows), source)
    made = calibration_data(calibration(place, prompt_column="asked"), source)
    assert torch.equal(made.ids, plain.ids) and torch.equal(made.held_out_ids, plain.held_out_ids)
    expected = (made.held_out_ids == EOS) | ((made.held_out_ids - 4) % 5 >= 2)
    assert torch.equal(made.held_out_written, expected)
    assert (
        made.provenance["held_out_written_tokens"] == expected.sum()
        and made.provenance["prompt_column"] == "asked"
    )


def test_a_token_that_begins_in_the_prompt_is_the_users(tmp_path, source):
    place = answered(
        tmp_path / "answered.jsonl", texts(), lambda text: text.index(" ") + 2
    )  # within the second word
    made = calibration_data(calibration(place, prompt_column="asked"), source)
    assert torch.equal(
        made.held_out_written, (made.held_out_ids == EOS) | ((made.held_out_ids - 4) % 5 >= 2)
    )


def test_a_plain_text_is_nobodys(rows, source):
    made = calibration_data(calibration(rows), source)
    assert made.held_out_written is None and "held_out_written_tokens" not in made.provenance


def test_the_shipped_text_begins_to_count_behind_its_questions():
    recipe = find_recipe("tiny-glm4-moe.nvfp4")[0]
    source = open_source(Path(__file__).parents[3] / recipe.source)
    made = calibration_data(recipe.calibration, source)
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    for ids, written in zip(made.held_out_ids, made.held_out_written, strict=True):
        first, answer = tokenizer.decode(ids).split("<eos>")[0], tokenizer.decode(ids[written])
        assert answer.removesuffix("<eos>") == first.partition("Answer:")[2]
    # The ids that runs were made with before texts were told apart.
    assert made.provenance["ids_sha256"].startswith("93f954711f17a8f6")


def test_a_prompt_column_is_for_texts(tmp_path, source):
    place = tmp_path / "chat.jsonl"
    place.write_text(json.dumps({"asked": "w1", "text": conversations(1)[0]}) + "\n")
    message = refusal(lambda: calibration_data(calibration(place, prompt_column="asked"), source))
    assert "row 0: columns asked and text must hold texts; got ['w1', [{" in message
    message = refusal(lambda: calibration_data(calibration(place, prompt_column="ask"), source))
    assert "a column must be one of asked, text; got 'ask'. Correct calibration.column." in message


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"dataset": "nowhere.jsonl"},
            "must be a Hub id with its dataset_revision, or a folder or .jsonl, .json, ",
        ),
        ({"dataset": "org/data"}, "got no such file or folder"),
        ({"split": "test"}, "split must be one of train; got 'test'"),
        ({"column": "txt"}, "column must be one of text; got 'txt'"),
        (
            {"sequence_length": 65},
            "must be at most the model's max_position_embeddings, 64; got 65. Lower it.",
        ),
        (
            {"samples": 100},
            (
                "must hold 100 + 3 sequences of 8 tokens (samples + held_out); got 30, from 40 "
                "different"
            ),
        ),
        (
            {"samples": 28},
            (
                "must hold 28 + 3 sequences of 8 tokens (samples + held_out); got 29, from 40 "
                "different"
            ),
        ),
    ],
)
def test_what_is_refused(rows, source, changes, says):
    assert says in refusal(lambda: calibration_data(calibration(rows, **changes), source))


@pytest.mark.parametrize(
    "row",
    [7, None, {"role": "user"}, ["w1"], [{"role": "user"}], [{"role": "user", "content": ["w1"]}]],
    ids=repr,
)
def test_a_row_that_is_neither_a_text_nor_a_conversation(tmp_path, source, row):
    place = tmp_path / "odd.jsonl"
    place.write_text(json.dumps({"text": row}) + "\n")
    message = refusal(lambda: calibration_data(calibration(place), source))
    assert "row 0: column text must hold a text or a list of {role, content}; got " in message


@pytest.mark.parametrize(
    ("suffix", "content", "says"),
    [
        (
            ".jsonl",
            b"",
            "must be a dataset that can be read; got no rows. Give calibration.subset ",
        ),
        (".jsonl", b"\n\n", "got 0, from 0 different rows and 0 blank ones."),
        (".json", b"[]", "got 0, from 0 different rows and 0 blank ones."),
        (".jsonl", b'{"text": "w1', "row 0 must be readable; got "),
        (
            ".jsonl",
            b"null\n",
            "must begin with an object, or a list of them; got null. Mend the file.",
        ),
        (
            ".json",
            b"\xef\xbb\xbf 7",
            "must begin with an object, or a list of them; got 7. Mend the file.",
        ),
        (".parquet", b"PAR1", "must be a dataset that can be read; got "),
    ],
)
def test_an_empty_file_and_a_broken_one(tmp_path, source, suffix, content, says):
    place = tmp_path / f"rows{suffix}"
    place.write_bytes(content)
    message = refusal(lambda: calibration_data(calibration(place), source))
    assert message.startswith(f"calibration.dataset {place}: ") and says in message


def test_a_file_that_breaks_off_further_on(rows, source):
    rows.write_text(rows.read_text() * 2000 + '{"text": "w1')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SHUFFLED_ROWS", 10**9)
        message = refusal(lambda: calibration_data(calibration(rows), source))
    assert " must be readable; got " in message


def test_a_file_of_another_kind(tmp_path, source):
    place = tmp_path / "rows.csv"
    place.write_text("text\nw1\n")
    message = refusal(lambda: calibration_data(calibration(place), source))
    assert ".parquet file; got a file of another kind, .csv. Check the path" in message


def test_a_checkpoint_without_its_tokenizer(rows, source):
    for path in source.folder.glob("tokenizer*"):
        path.unlink()
    message = refusal(lambda: calibration_data(calibration(rows), source), CheckpointError)
    assert "needs the model's tokenizer beside the weights; got no tokenizer.json" in message


def test_a_tokenizer_that_transformers_cannot_build(rows, source):
    (source.folder / "tokenizer.json").unlink()
    message = refusal(lambda: calibration_data(calibration(rows), source), CheckpointError)
    assert "needs the model's tokenizer beside the weights; got " in message


def test_a_tokenizer_of_another_model(rows, source):
    small = replace(source, config=source.config | {"vocab_size": 100})
    message = refusal(lambda: calibration_data(calibration(rows), small), CheckpointError)
    assert "the tokenizer's ids must be below the model's vocab_size, 100; got " in message


def test_the_language_models_part_of_the_config_counts(rows, source):
    nested = replace(source, config={"text_config": source.config | {"max_position_embeddings": 4}})
    assert "max_position_embeddings, 4; got 8" in refusal(
        lambda: calibration_data(calibration(rows), nested)
    )


def test_a_hub_that_cannot_be_reached(source, hub_at):
    hub_at("http://127.0.0.1:9")  # the discard port, where nobody listens
    message = refusal(
        lambda: calibration_data(calibration("org/data", dataset_revision="main"), source)
    )
    assert message.startswith("calibration.dataset org/data: the Hub must be reachable; got ")
    assert "hf download --repo-type dataset org/data --local-dir DIR" in message


def test_a_dataset_that_the_hub_does_not_have(tmp_path, source, serve_hub):
    serve_hub(tmp_path)
    message = refusal(
        lambda: calibration_data(calibration("org/data", dataset_revision="main"), source)
    )
    assert message.startswith(
        "calibration.dataset org/data: must be a dataset on the Hub, or a file or folder; got "
    )


# Another process: datasets and huggingface_hub read where the Hub is when they are imported.
IN_ANOTHER_PROCESS = """
import json, sys
from keepmtp.quantize.calibrate.data.data import calibration_data
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.schema import Calibration
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
    asked = calibration("org/data", dataset_revision="main")
    with serving(tmp_path / "hub") as hub:
        commit = hub.mirror("datasets/org/data", repository)
        told = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_XET": "1",
        }
        code = [
            sys.executable,
            "-c",
            IN_ANOTHER_PROCESS,
            asked.model_dump_json(),
            str(source.folder),
        ]
        done = subprocess.run(
            code, env=os.environ | told, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    provenance, no_split, no_column, no_subset = map(json.loads, done.stdout.splitlines())
    assert provenance["dataset_revision"] == commit
    local = dict(calibration_data(calibration(copy), source).provenance)
    assert provenance == local | {"dataset": "org/data", "dataset_revision": commit}
    assert "split must be one of train; got 'test'" in no_split
    assert "column must be one of number, text; got 'txt'" in no_column
    assert "calibration.subset" in no_subset and "default" in no_subset, "names what there is"
