"""`keepmtp bench`: tokens a second of a checkpoint with and without drafting, under each load, by `vllm bench serve`.

In: a checkpoint, a list of k and loads, and prompts. Out: a table with a recommended k for each load, bench.json with
every repetition, and the report made anew.

Easy to get wrong: a matrix takes hours, so whatever may be refused is refused before the first server is started. And a
cell in which a request failed has no figure: its sentence is printed, and the exit status is 1.
"""

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..recipes.errors import RecipeError
from ..recipes.extras import require_extra
from ..validate.facts.vllm_env import TIMEOUT_SECONDS
from .exits import FINDINGS
from .options import AnyVLLMOption, JsonOption, TimeoutOption, chosen_vllm, refuse_stray_words
from .progress import bytes_bar, downloaded, measuring
from .tables import print_json, say

if TYPE_CHECKING:
    from ..checkpoints.source import Source
    from ..validate.facts.served import Role

_MOST_K = 4
_LIMIT = 1 << 20
_NUMBERS = re.compile(r"\d{1,9}(?:\.\.\d{1,9})?")


def bench(
    context: typer.Context,
    path: Annotated[str, typer.Argument(help="Checkpoint to measure: a folder or a Hub id.")],
    source: Annotated[
        str | None, typer.Option(help="What it was made from, folder or Hub id: the same matrix for it too.")
    ] = None,
    k: Annotated[
        str | None,
        typer.Option("-k", "--k", help="Tokens drafted a step: 0..4, or 0,1,3. Default: 0..4, as far as it can draft."),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, such as 1,8,32.")] = "1,8,32",
    contexts: Annotated[
        str,
        typer.Option(
            "--context",
            help="Bring prompts to so many tokens, such as 1024,8192; 0: as they are. Too short ones get other "
            "prompts before them.",
        ),
    ] = "0",
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Your own: a .jsonl file, each line with `prompt`, `messages` or `turns` (SPEED-Bench); default: "
            "400 word problems."
        ),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=0, help="Requests a repetition; 0: four for each in flight, 16 at least.")
    ] = 0,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 256,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of each cell with each server.")] = 3,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often each server is started: 2 also shows a machine that drifts.")
    ] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the order in which prompts are taken.")] = 0,
    timeout: TimeoutOption = TIMEOUT_SECONDS,
    any_vllm: AnyVLLMOption = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder for bench.json and the repetitions alone; default: "
            "NAME.report beside the checkpoint, with all its results.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cells and the number of servers; start none.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure how fast vLLM serves a checkpoint with and without MTP, for each k and load; recommend a k.

    vLLM's own `vllm bench serve` asks a server that is started for each k; k=0 serves without MTP. All k get the same
    requests, greedily, through the chat template where there is one, and answers end by themselves. A larger k is
    recommended only if its slowest repetition is faster than the fastest of the smaller one. Each repetition is kept
    as it comes: the same command measures only what is missing. Words after `--` go to `vllm serve`.

    Exit status 1 if a server or a request fails.

    Example: `keepmtp bench /data/out -k 0..4 --concurrency 1,8,32 --prompts qualitative.jsonl -- -tp 8`
    """
    from ..checkpoints.identity import identify
    from ..checkpoints.source import open_source
    from ..checkpoints.source_of import original_of
    from ..validate.facts.results import file_of, report_folder, write_result
    from ..validate.measure import bench as matrix
    from ..validate.measure import bench_prompts as asked
    from ..validate.measure.harness import Model, Setup
    from ..validate.measure.room import refuse_no_room
    from ..validate.measure.server import refuse_words
    from ..validate.report import report as reports
    from .bench_tables import counted, planned, tables

    refuse_stray_words("bench", context.args)
    refuse_words("bench", context.args)
    err = Console(stderr=True)
    opened = open_source(path)
    original = original_of(opened, source, cure="") if source else None
    is_recorded = folder is None and Path(path).is_dir()
    plan = matrix.BenchPlan(
        ks=_ks(k, opened),
        concurrency=numbers("--concurrency", concurrency, least=1),
        contexts=numbers("--context", contexts, least=0),
        prompts=asked.read(prompts),
        requests=requests,
        output_tokens=output_tokens,
        repeat=repeat,
        rounds=rounds,
        seed=seed,
    )
    for each in filter(None, (opened, original)):
        matrix.refuse_model(each, plan, context.args)
    if dry_run:
        num = 1 + (original is not None)
        if as_json:
            print_json(counted(plan, num), indent=None)
        else:
            Console().print(planned(plan, num), highlight=False)
        return
    vllm = chosen_vllm(any_vllm=any_vllm)
    if vllm.build == "cpu":  # which refuses some checkpoints only when it is asked to serve them
        require_extra("a BF16 copy, for what vLLM's CPU build has no kernel for,", "quantize")
    out = folder or (report_folder(Path(path)) if is_recorded else Path(f"{Path(opened.where).name}.report"))
    refuse_no_room((opened, original), vllm, out=out, extra=context.args)
    reading = None if as_json else bytes_bar(err, "reading")

    def model(role: "Role", each: "Source") -> Model:
        local = downloaded(each, err, is_shown=not as_json)
        assert local.folder is not None, "download() gives a folder"
        return Model(role=role, source=local, identity=identify(local.folder, cache=out, watch=reading))

    checkpoint = model("checkpoint", opened)
    if is_recorded:
        reports.refuse_stale(out, checkpoint.identity, but=("bench",))
    compared = original and model("source", original)
    setup = Setup(vllm=vllm, out=out, timeout=timeout, extra=tuple(context.args), say=partial(say, err))
    with measuring(err, as_json=as_json) as watch:
        fact = matrix.bench(checkpoint, compared, plan, setup=setup, watch=watch)
    write_result(out, "bench", fact, checkpoint=checkpoint.identity, vllm=vllm.version)
    if is_recorded:
        reports.refresh(out, measured="bench")
    if as_json:
        print_json({"bench": fact.model_dump(mode="json")}, indent=None)
    else:
        for part in tables(fact):
            Console().print(part, highlight=False)
        where = f"Result: {file_of(out, 'bench')}; repetitions beside it; logs: {out / 'logs'}"
        say(Console(), where)
    if any(cell.error for each in fact.benched for cell in each.cells):
        raise typer.Exit(FINDINGS)


def numbers(option: str, words: str, *, least: int) -> tuple[int, ...]:
    """Numbers of a list such as `1,8,32` or `0..4`, ascending, each once.

    Raises:
        RecipeError: no such list, or a number below `least`.
    """
    parts = [part.strip() for part in words.split(",")]
    cure = f"Write {option} 1,8,32 or {option} {least}..4"
    if not all(_NUMBERS.fullmatch(part) for part in parts):
        raise RecipeError(option, "must be numbers with commas, or two with dots", got=words, cure=cure)
    pairs = [(int(part.split("..")[0]), int(part.split("..")[-1])) for part in parts]
    if wrong := next((f"{low}..{high}" for low, high in pairs if low > high or high - low > 64), ""):
        raise RecipeError(option, "must be a range that goes up, by 64 at most", got=wrong, cure=cure)
    wrong = next((str(high) for _, high in pairs if high > _LIMIT), "")
    wrong = wrong or next((str(low) for low, _ in pairs if low < least), "")
    if wrong:
        rule = f"must be {least} or more, and at most {_LIMIT:,}"
        raise RecipeError(option, rule, got=wrong, cure=cure)
    return tuple(sorted({number for low, high in pairs for number in range(low, high + 1)}))


def _ks(words: str | None, checkpoint: "Source") -> tuple[int, ...]:
    """Those that the user names; else 0 to 4, as far as the MTP block can draft them."""
    from ..recipes.families import find_view
    from ..validate.measure.harness import ks_up_to

    if words is not None:
        return numbers("--k", words, least=0)
    num_layers = find_view(checkpoint.config, checkpoint.where, checkpoint.entries).num_mtp_layers
    return ks_up_to(max(_MOST_K, num_layers), num_layers) if num_layers else (0,)
