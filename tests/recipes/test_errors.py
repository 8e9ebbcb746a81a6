"""A refusal's message: one sentence that shows a stranger's text and never obeys it."""

import pytest
from data_files import table
from keepmtp.recipes.errors import MAX_GOT, CheckpointError, printable

HOSTILE = table("recipes/hostile_text")


@pytest.mark.parametrize("text, shown", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_shown(text, shown):
    assert printable(text) == shown
    printable(text).encode()


def test_letters_of_every_language_stay():
    text = (
        "gr\u00fc\u00dfe \u6a21\u578b \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 "
        "\U0001f642 a b"
    )
    assert printable(text) is text


@pytest.mark.parametrize("text, shown", HOSTILE.values(), ids=HOSTILE)
def test_a_message_shows_what_its_fields_keep(text, shown):
    error = CheckpointError(text, f"{text} must be there", got=text, cure=f"Mend {text}")
    assert str(error) == f"{shown}: {shown} must be there; got {shown}. Mend {shown}."
    assert (error.where, error.got) == (text, text)
    assert str(error.at(text)).startswith(f"{shown}: {shown}: ")


@pytest.mark.parametrize("char", ["a", "\x1b"])
def test_a_message_quotes_only_the_start_of_a_long_value(char):
    message = str(CheckpointError("x", "must be short", got=char * 10**6, cure="Cut it"))
    got = message.partition("got ")[2].partition(". Cut it.")[0]
    assert got.endswith("... (1000000 characters)") and len(got) < MAX_GOT + 40
    message = str(
        CheckpointError(char * 10**6, f"{char * 10**6} must be short", got="x", cure=char * 10**6)
    )
    assert len(message) < 10_000
