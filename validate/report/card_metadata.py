"""A card's front matter and its entry on a leaderboard: what the Hub reads.

In: a report, the checkpoint's record, the source's card if it is here, and what the command line says. Out: YAML,
through huggingface_hub's own types.

Easy to get wrong: a score on other questions, on the first fifty, or of a copy's answers looks like a score of the
benchmark. The card says it, and it is no entry of the leaderboard.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResultEntry, ModelCardData, eval_result_entries_to_yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from ...checkpoints.source import Source
from ...recipes.errors import CheckpointError, RecipeError
from ..facts.evaluated import TaskFact
from ..facts.schema import FullReport
from .card_page import CardFacts, percent

README = "README.md"
INHERITED = ("license", "license_name", "license_link", "pipeline_tag", "language")
"""What a checkpoint's card copies from its source's card. The source's base model is not the checkpoint's."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
# The Hub's own forms; https://huggingface.co/docs/hub/model-cards#model-card-metadata.
_WORD = re.compile(r"[\w.+-]{1,64}", re.ASCII)
_TEXT = re.compile(r"[^\x00-\x1f\x7f]{1,256}")
_FORMS: Mapping[str, re.Pattern[str]] = {
    "base_model": HUB_ID,
    "license": _WORD,
    "license_name": _TEXT,
    "license_link": _TEXT,
    "pipeline_tag": _WORD,
    "language": _WORD,
}
_CURES = {"license": "Choose with --license, like apache-2.0"}
# Benchmarks of the Hub (https://huggingface.co/docs/hub/eval-results): repository, task in its eval.yaml, questions.
BENCHMARKS: Mapping[str, tuple[str, str, int]] = {
    "gsm8k": ("openai/gsm8k", "gsm8k", 1319),
    "mmlu_pro": ("TIGER-Lab/MMLU-Pro", "mmlu_pro", 12032),
    "gpqa_diamond": ("Idavidrein/gpqa", "diamond", 198),
}
_SHA = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """What the front matter says and nobody measured; "" or () where it is not known."""

    base_model: str = ""
    license: str = ""
    license_name: str = ""
    license_link: str = ""
    pipeline_tag: str = ""
    language: tuple[str, ...] = ()


def read_front_matter(folder: Path) -> dict[str, Any]:
    """The front matter of a folder's README.md; {} where there is none.

    Raises:
        CheckpointError: it is not a YAML mapping.
    """
    path = folder / README
    if not path.is_file():
        return {}
    try:
        block = REGEX_YAML_BLOCK.search(path.read_text(encoding="utf-8"))
        told = yaml.safe_load(block[2]) if block else {}
        if told is None or isinstance(told, dict):
            return told or {}
        got = f"a {type(told).__name__}"
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        got = " ".join(str(error).split())
    raise CheckpointError(path, "front matter must be a YAML mapping", got=got, cure="Mend or remove it")


def metadata_of(
    opened: Source,
    front: Mapping[str, Any],
    given: Mapping[str, str | None],
    *,
    base_model: str = "",
    where: object,
) -> Metadata:
    """What the command line says, else a card's front matter, else config.json; `base_model` is what is known of it.

    Raises:
        RecipeError: a value that does not have the Hub's form.
    """
    found = dict(front) | {key: value for key, value in given.items() if value is not None}
    if given.get("license") is not None:
        found |= {"license_name": None, "license_link": None}
    found["base_model"] = base_model
    found["pipeline_tag"] = found.get("pipeline_tag") or (
        "image-text-to-text" if "vision_config" in opened.config else "text-generation"
    )
    for key, form in _FORMS.items():
        for value in _listed(found.get(key)):
            if not form.fullmatch(value):
                place = f"{where}: {key}" if given.get(key) is None else f"--{key.replace('_', '-')}"
                cure = _CURES.get(key, "Mend the card")
                raise RecipeError(place, "must have the Hub's form", got=repr(value), cure=cure)
    words = {key: next(iter(_listed(found.get(key))), "") for key in _FORMS if key != "language"}
    return Metadata(**words, language=tuple(_listed(found.get("language"))))


def front_matter(told: CardFacts, metadata: Metadata) -> str:
    """The card's YAML for the Hub, without its fences."""
    schemes = [name.lower() for name in told.schemes]
    roots = [re.sub(r"(?<=fp4)a(8|16)$|_(dynamic|block)$", "", name) for name in schemes]
    has_experts = any(group.modules == "experts" for group in told.groups)
    relation: dict[str, Any] = {"base_model_relation": "quantized"} if metadata.base_model else {}
    data = ModelCardData(
        base_model=metadata.base_model or None,
        license=metadata.license or None,
        license_name=metadata.license_name or None,
        license_link=metadata.license_link or None,
        language=list(metadata.language) or None,
        library_name="vllm",
        pipeline_tag=metadata.pipeline_tag,
        tags=[
            told.report.facts.dialect,
            *roots,
            *(name.replace("_", "-") for name in schemes),
            "mtp",
            "speculative-decoding",
            "vllm",
            *(["moe"] if has_experts else []),
            "keepmtp",
        ],
        **relation,
    )
    return data.to_yaml()


def off_leaderboard(evaluation: TaskFact) -> str:
    """Why a score is no entry of its benchmark's leaderboard, in a sentence; "" where it is one."""
    protocol, never = evaluation.protocol, "The score is not on the benchmark's leaderboard"
    if protocol.dataset:
        return (
            f"The questions are from a file of {protocol.task}'s form, `{protocol.dataset}`, not its own: the "
            "score compares with the source's beside it and with no other, and is on no leaderboard."
        )
    if protocol.task not in BENCHMARKS:
        return f"{never}: keepmtp does not know {protocol.task} as a benchmark of the Hub."
    asked, total = evaluation.checkpoint.num_questions, BENCHMARKS[protocol.task][2]
    if asked != total:
        return f"{never}: {asked:,} questions were asked, and it has {total:,}."
    if evaluation.checkpoint.as_served != "native":
        return f"{never}: a {evaluation.checkpoint.as_served} answered, not these bytes."
    return ""


def eval_results(report: FullReport) -> dict[str, str]:
    """`.eval_results/<task>.yaml` for each task that is a benchmark of the Hub: the score that counts, in percent.

    Source: huggingface_hub 1.33 _eval_results.py; one variant a file, and how it was measured in `notes`.
    """
    tasks = report.evaluation.by_task if report.evaluation else ()
    return {
        f".eval_results/{task.protocol.task}.yaml": _eval_result(report, task)
        for task in tasks
        if not off_leaderboard(task)
    }


def _eval_result(report: FullReport, task: TaskFact) -> str:
    protocol = task.protocol
    dataset, task_id, _ = BENCHMARKS[protocol.task]
    name = task.judged_filter(report.judgement.gates.filter if report.judgement else task.checkpoint.scores[0].filter)
    score, revision = task.checkpoint.score(name), protocol.dataset_revision or ""
    entry = EvalResultEntry(
        dataset_id=dataset,
        task_id=task_id,
        value=round(100 * score.value, 2),
        date=report.made_at[:10],
        dataset_revision=revision if _SHA.fullmatch(revision) else None,
        notes=f"{name}, {protocol.shots}-shot, {protocol.api}, max_tokens {protocol.max_tokens}, "
        f"standard error {percent(score.stderr)}, lm-evaluation-harness, vLLM {report.vllm} with method=mtp "
        f"k={protocol.k}",
    )
    return yaml.safe_dump(eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True, width=1000)


def _listed(value: Any) -> list[str]:
    """A value of a front matter as a list of words; YAML reads `no`, which is Norwegian, as false."""
    values = value if isinstance(value, (list, tuple)) else [] if value in (None, "") else [value]
    return ["no" if each is False else str(each) for each in values]
