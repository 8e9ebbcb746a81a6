"""How every cure ends: the check, and vLLM's own loaders where there is a vLLM.

In: a folder that is finished, or one of headers. Out: what was found, and why vLLM was not asked,
if it was not.

Easy to get wrong: a vLLM that is not there is no finding. A person without one still gets the
check, and the reason why vLLM was not asked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..recipes.errors import VLLMError
from ..validate.check.check import Checked, examine
from ..validate.facts.dry_load import GPU

GPUS: tuple[GPU, ...] = ("sm100",)
"""Where nobody names one: the GPU whose kernels take every scheme."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What was found of a new checkpoint.

    Attributes:
        checked: facts, findings and dry loads.
        no_vllm: why vLLM was not asked; None if it was.
    """

    checked: Checked
    no_vllm: VLLMError | None = None

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return self.checked.refusal is None and self.checked.data.ok


def judge(
    folder: Path,
    *,
    gpus: Sequence[GPU] = GPUS,
    any_vllm: bool = False,
    name: str | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> Judged:
    """Check a folder, then let vLLM's classes load it, on each of these GPUs at TP 1.

    Args:
        folder: a checkpoint, or one of headers alone.
        gpus: to pretend; none: the check alone.
        any_vllm: also a vLLM that keepmtp was not tested with.
        name: what the checkpoint is called in what is found; default its folder.
        progress: gets a line that says what is done now.
    """
    no_vllm, checked = None, None
    if gpus:
        from ..validate.dryload.check_on import check_on
        from ..validate.facts.vllm_env import find_vllm

        try:
            (checked,) = check_on(
                [str(folder)], vllm=find_vllm(any_version=any_vllm), gpus=gpus, progress=progress
            )
        except VLLMError as error:
            no_vllm = error
    if checked is None:
        progress(f"{folder}: static check")
        checked = examine(folder)
    return Judged(checked=named(checked, folder, name or checked.data.path), no_vllm=no_vllm)


def named(checked: Checked, folder: Path, name: str) -> Checked:
    """What was found of a folder, under the name that people know the checkpoint by."""
    data = checked.data
    findings = tuple(
        finding.model_copy(update={"where": finding.where.replace(str(folder), name)})
        for finding in data.findings
    )
    return checked._replace(data=data.model_copy(update={"path": name, "findings": findings}))
