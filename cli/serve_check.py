"""`keepmtp serve-check`: a served checkpoint next to its served source: what is accepted with and
without method=mtp.

In: two checkpoints. Out: tables of servers, figures and gates; serve.json with the servers' logs in
the same folder, and the report made anew.
"""

from typing import Annotated

import typer

from ..recipes.errors import RecipeError
from .options import (
    DraftOption,
    K,
    MaxTokensOption,
    OriginalOption,
    PromptsOption,
    ServeOptions,
)
from .tables import answer


def depths_of(depth: str, *, probe: bool) -> tuple[int, ...]:
    """The depths at which the probe is asked; none without the probe.

    Raises:
        RecipeError: no numbers, or both options.
    """
    from .bench import numbers

    depths = numbers("--depth", depth, least=0)
    if probe:
        return depths
    if any(depths):
        rule, cure = "must be left out with --no-probe", "Leave one of them out"
        raise RecipeError("--depth", rule, got=depth, cure=cure)
    return ()


def serve_check(
    served: ServeOptions,
    source: OriginalOption = None,
    k: Annotated[int, typer.Option(*K, min=1, help="Serve with 1 to k drafted tokens.")] = 1,
    prompts: PromptsOption = None,
    max_tokens: MaxTokensOption = 256,
    probe: Annotated[bool, typer.Option(help="Also ask the probe, in twelve scripts.")] = True,
    depth: Annotated[str, typer.Option(help="Ask it after so many other tokens.")] = "0",
    draft: DraftOption = "",
) -> None:
    """Serve a checkpoint and its source with vLLM, with and without MTP, and compare what is
    accepted.

    A probe in twelve scripts and in code counts what English prose does not show: broken
    characters, broken JSON, text that repeats itself, another script. With --depth, such as
    0,1000,8000,32000, it is asked after so many tokens of other text: a wrong KV cache shows in
    long contexts. The prompts are eight word problems, or yours: one a line, or .jsonl with
    "prompt".

    The gates are those of the recipe that the checkpoint was made by, as in `keepmtp gate`. Exit
    status 1 if one of them is a regression: a server of the checkpoint does not come up, acceptance
    lost more than the recipe allows, drafting changes greedy outputs, the probe has more faults
    with MTP or than in the source, beyond chance, or the check has an error; 3 if the prompts are
    too few to tell: the table says how many would do.

    Words after `--` go to `vllm serve`. Without a GPU, a checkpoint that vLLM's CPU build has no
    kernel for is served as a BF16 copy of the same weights, and the report says so.

    With --draft, the draft is judged, PATH is its target, and its results are in DRAFT.report.

    \b
    Example: `keepmtp serve-check /data/out --source /data/GLM-4.7 -k 3 -- --tensor-parallel-size 8`
    """
    from ..checkpoints.source import view_of
    from ..validate.facts.binomial import refuse_without_scipy
    from ..validate.measure import serve_check as measure
    from ..validate.measure.harness import ks_up_to
    from ..validate.measure.probe import refuse_depth
    from ..validate.measure.texts import PROMPTS, read_prompts
    from ..validate.report.check_data import record_static, static
    from .measured import exit_status
    from .measured import served as shown
    from .session import Session, save

    refuse_without_scipy()  # its gate has exact limits
    depths = depths_of(depth, probe=probe)
    asked = PROMPTS
    if prompts is not None:
        asked = tuple(item.text for item in read_prompts(prompts).items)
    session = Session("serve-check", "serve", served, source, draft)
    # Every refusal comes before the first server: of a limit in keepmtp.json that is none, too.
    gates = session.gates
    ks = ks_up_to(k, view_of(session.opened).draft_unit)
    for opened in filter(None, (session.opened, session.original)):
        refuse_depth(opened, max(depths, default=0))
    check = measure.Check(ks=ks, prompts=asked, max_tokens=max_tokens, depths=depths)
    checkpoint, original = session.models("check")
    with session.watched() as setup:
        fact = measure.serve_check(checkpoint, original, setup=setup, check=check)
    source_opened = original and original.source
    beside = {"source": source_opened, "target": fact.target}
    # Next to the checkpoint's other results, or a folder of its own: then the report has a check of
    # these bytes made for it, and no other measurement.
    if session.is_recorded:
        record_static(session.out, checkpoint.source, checkpoint.identity, **beside)
        judged = session.keep(fact, checkpoint)
    else:
        checked = static(checkpoint.source, **beside).data
        judged = session.keep(fact, checkpoint, gates=gates, check=checked, serve=fact)
        facts = {"opened": checkpoint.source, "source": source_opened, "serve": fact}
        save(session.out, checked, vllm=session.setup.vllm.version, judgement=judged, **facts)
    value = {**dict(fact), "judgement": judged}
    status = exit_status(judged, fact)
    answer(value, shown(fact, judged, session.places), as_json=served.as_json, status=status)
