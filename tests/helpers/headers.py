"""The first line of a file of answers, with what a test says of it."""

from typing import Any

from keepmtp.recipes.protocol import Evaluation
from keepmtp.validate.measure.answers import Header


def header(**changed: Any) -> Header:
    """Of three questions to the source, unless something else is said."""
    return Header(
        **{
            "role": "source",
            "protocol": Evaluation(),
            "dataset_sha256": "d",
            "prompts_sha256": "p",
            "num_questions": 3,
            "checkpoint_sha256": "c",
            "vllm": "0.32.0",
            "device": "CPU",
            **changed,
        }
    )
