"""README.md and its picture are what `make picture` makes: neither is edited by hand."""

from readme import PICTURE, README, picture, with_table


def test_the_picture_is_what_is_made_today():
    assert PICTURE.read_text() == picture(), "run `make picture`"


def test_the_picture_fetches_nothing():
    """It is shown on pages that load it from elsewhere: no font, no script, no address but that of
    SVG itself.
    """
    text = PICTURE.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not [
        word for word in ("http", "url(data", "@font-face", "@import", "<script") if word in text
    ]


def test_the_table_of_families_is_what_is_made_today():
    text = README.read_text()
    assert text == with_table(text), "run `make picture`"
