"""What each change of `keepmtp fix` leaves in config.json."""

from broken import BROKEN
from checkpoint_files import write
from keepmtp.cure.fix import proposed


def test_layer_types_are_cut(tmp_path):
    """The decoder's layers come first; what is too much is the MTP layer's."""
    (case,) = (case for case in BROKEN if case.name.startswith("E5 "))
    checkpoint = case.build()
    listed = checkpoint.config["text_config"]["layer_types"]
    assert listed != listed[::-1], "else either end could be cut"
    outcome = proposed(str(write(tmp_path / "E5", checkpoint)))
    assert outcome.after.data.ok
    fixed = outcome.proposal.value("config.json", ("text_config", "layer_types"))
    assert fixed == listed[: checkpoint.config["text_config"]["num_hidden_layers"]]
