"""What is known of one failure that a log shows."""

from typing import Literal

from ...checkpoints.fact import Fact

Command = Literal["graft", "fix", "convert", "values", "check", ""]


class KnownFailure(Fact):
    """One failure.

    Attributes:
        name: what it is called here.
        words: regular expression on a line of the log; the group `tensor`, if it has one, is a name in vLLM or on disk.
        sources: public threads, or numbers of docs/failures.md.
        concerns: the versions of vLLM that have it.
        says: what happened, and why.
        cure: what to do.
        command: keepmtp's own command for it.
        rules: rules of the check that confirm it on a checkpoint.
    """

    name: str
    words: str
    sources: str
    concerns: str
    says: str
    cure: str
    command: Command = ""
    rules: tuple[str, ...] = ()

    @property
    def is_general(self) -> bool:
        """Whether other faults end in the same words."""
        return self.concerns.startswith(GENERAL)


ALL_VERSIONS = "0.32; older ones were not read"
GENERAL = "this is general: other faults end in the same words, and defects of older versions did"
