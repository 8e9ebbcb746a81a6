"""The first line of a file of answers, with what a test says of it."""

from typing import Any

from keepmtp.recipes.protocol import Evaluation
from keepmtp.validate.measure.store import AnswersHeader


def header(**changed: Any) -> AnswersHeader:
    """Of three questions to the source, unless something else is said."""
    return AnswersHeader(
        **{
            "role": "source",
            "protocol": Evaluation(),
            "dataset_sha256": "d",
            "prompts_sha256": "p",
            "num": 3,
            "checkpoint_sha256": "c",
            "vllm": "0.32.0",
            "device": "CPU",
            **changed,
        }
    )
