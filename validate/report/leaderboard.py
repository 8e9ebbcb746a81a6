"""A card's entry on a benchmark's leaderboard, as the Hub reads it.

In: a report. Out: YAML, through huggingface_hub's own types, or why there is none.

Easy to get wrong: a score on other questions, on the first fifty, or of a copy's answers looks like
a score of the benchmark. The card says it, and it is no entry of the leaderboard.
"""

import re
from collections.abc import Mapping

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from ..facts.evaluated import TaskFact
from ..facts.schema import FullReport
from .numbers import percent

# Benchmarks of the Hub (https://huggingface.co/docs/hub/eval-results): repository, task in its
# eval.yaml, questions.
BENCHMARKS: Mapping[str, tuple[str, str, int]] = {
    "gsm8k": ("openai/gsm8k", "gsm8k", 1319),
    "mmlu_pro": ("TIGER-Lab/MMLU-Pro", "mmlu_pro", 12032),
    "gpqa_diamond": ("Idavidrein/gpqa", "diamond", 198),
}


def off_leaderboard(task: TaskFact) -> str:
    """Why a score is no entry of its benchmark's leaderboard, in a sentence; "" where it is one."""
    protocol, never = task.protocol, "The score is not on the benchmark's leaderboard"
    if protocol.dataset:
        return (
            f"The questions are from a file of {protocol.task}'s form, `{protocol.dataset}`, not "
            "its own: the score compares with the source's beside it and with no other, and is "
            "on no leaderboard."
        )
    if protocol.task not in BENCHMARKS:
        return f"{never}: keepmtp does not know {protocol.task} as a benchmark of the Hub."
    asked, total = task.checkpoint.num_questions, BENCHMARKS[protocol.task][2]
    if asked != total:
        return f"{never}: {asked:,} questions were asked, and it has {total:,}."
    if task.checkpoint.as_served != "native":
        return f"{never}: a {task.checkpoint.as_served} answered, not these bytes."
    return ""


def eval_results(report: FullReport) -> dict[str, str]:
    """`.eval_results/<task>.yaml` for each task that is a benchmark of the Hub: the score that
    counts, in percent.

    Source: huggingface_hub 1.33 _eval_results.py; one variant a file, and how it was measured in
    `notes`.
    """
    files = {}
    for task in report.evaluation.by_task if report.evaluation else ():
        if off_leaderboard(task):
            continue
        protocol, scores = task.protocol, task.checkpoint.scores
        dataset, task_id, _ = BENCHMARKS[protocol.task]
        name = task.judged_filter(
            report.judgement.gates.filter if report.judgement else scores[0].filter
        )
        score, revision = task.checkpoint.score(name), protocol.dataset_revision or ""
        entry = EvalResultEntry(
            dataset_id=dataset,
            task_id=task_id,
            value=round(100 * score.value, 2),
            date=report.made_at[:10],
            dataset_revision=revision if re.fullmatch(r"[0-9a-f]{40}", revision) else None,
            notes=(
                f"{name}, {protocol.shots}-shot, {protocol.api}, max_tokens {protocol.max_tokens}, "
                f"standard error {percent(score.stderr)}, lm-evaluation-harness, vLLM "
                f"{report.vllm} with method=mtp k={protocol.k}"
            ),
        )
        text = yaml.safe_dump(
            eval_result_entries_to_yaml([entry]), sort_keys=False, allow_unicode=True, width=1000
        )
        files[f".eval_results/{protocol.task}.yaml"] = text
    return files
