"""A finding as people see it: a block whose cure can be pasted, whatever the width, and whoever
made the names.
"""

import io
import re
from pathlib import Path

from checkpoint_files import write
from commands import ROOT, assert_shows
from data_files import cases, printed
from good import outputs_of, plan_of_recipe
from keepmtp.cli.findings import parts, with_path
from keepmtp.cli.findings import show as findings_of
from keepmtp.cli.tables import show, table
from keepmtp.validate.check.check import Checked, examine
from keepmtp.validate.dryload.check_on import _once, with_loads
from keepmtp.validate.facts.dry_load import (
    DryLoad,
    KernelUse,
    LoadAccount,
    LoadedModel,
    LoadFailure,
    cured_in,
    newest,
    serving,
    versions_in_short,
)
from keepmtp.validate.facts.findings import CheckpointFacts, Finding, objection
from keepmtp.validate.facts.results import CheckData
from releases import source_layout, write_checkpoint
from rich.console import Console

PATTERN = r"re:^model\.layers\.61\.mtp_block\.mlp\.experts\.\d+\.(?:down_proj|gate_proj|up_proj|gate_up_proj)$"
COMMAND = (
    "keepmtp check /data/some/very/long/folder/name/GLM-4.7-NVFP4A16 --gpu sm100 --gpu sm90 --tp "
    "4 --tp 8 --record"
)
CURE = f"Add '{PATTERN}' to ignore, and run `{COMMAND}` again"
SAYS = (
    "stored as plain BF16, but vLLM builds it as fp8_channel: it loads in silence and the draft "
    "guesses "
) * 2
ERROR = Finding(
    origin="static",
    severity="error",
    where="model.layers.61.mtp_block.mlp.experts.0.down_proj.weight",
    says=SAYS.strip(),
    cure=CURE,
    rule="form",
    count=1_536,
)
WARNING = ERROR.model_copy(update={"severity": "warning", "count": 1})
KERNEL = KernelUse(
    layer="L", method="M", kernel="TrtLlmBf16Experts", count=58, where="x", outcome="not judged: x"
)
DRAFT = {"num_params": 17, "num_written": 17, "shared": ("lm_head.weight",), "kernels": (KERNEL,)}
LOAD = DryLoad(
    vllm="0.32.0",
    gpu="sm100",
    tp=1,
    k=1,
    ok=True,
    target=LoadedModel(cls="Glm4MoeForCausalLM", num_params=1_458, num_written=1_458),
    draft=LoadedModel(cls="Glm4MoeMTP", **DRAFT),
)
FOLLOWS_K = CheckpointFacts(family="inkling_mm_model", num_mtp_layers=8)


def found(*findings: Finding, path: str = "out/x", **kept) -> CheckData:
    return CheckData(path=path, facts=CheckpointFacts(), findings=findings, **kept)


def shown(data: CheckData, width: int | None = None) -> str:
    """On a terminal of this width, or in a pipe."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=width is not None)
    show(parts(data, console=console), console)
    return file.getvalue()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@cases
def test_a_cure_is_never_broken(width):
    """What will happen is broken between words, at 120 columns at most, and in a pipe not at all."""
    data = found(ERROR, WARNING)
    text = plain(shown(data, width))
    if width == 40:
        printed("check.txt", text)
    stored = (ROOT / "tests" / "printed" / "check.txt").read_text()
    assert text.split() == stored.split(), "but for line ends the same"
    assert f"\n  cure: {CURE}\n" in text
    first = text.splitlines()[1]
    if width is None:
        assert first == f"  {SAYS.strip()}"
    else:
        assert 30 < len(first) <= min(width, 120)


def test_without_an_error_the_check_has_passed():
    unread = "; values: not read (--values reads them)\n"
    assert shown(found()) == f"check passed out/x: no findings{unread}"
    assert shown(found(WARNING, WARNING)).endswith(f"check passed out/x: 2 warnings{unread}")
    assert shown(found(values_read="scales")) == "check passed out/x: no findings\n"
    assert "read of the MTP block's norms alone" in shown(found(values_read="norms"))
    follows = found().model_copy(update={"facts": FOLLOWS_K})
    assert shown(follows).startswith(
        "vLLM builds an MTP layer for each drafted token: -k up to 8\n"
    )


def test_colours_are_for_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in shown(found(ERROR), 80) and "\x1b" not in shown(found(ERROR))


def test_a_stranger_moves_no_cursor():
    name = "evil\x1b[2J\u202e\ud800\r[red]x"
    hostile = ERROR.model_copy(
        update={"where": name, "says": f"{name} says", "cure": f"Do '{name}'"}
    )
    text = plain(shown(found(hostile, path=name), 80))
    text.encode()
    assert not set("\x1b\r\u202e\ud800") & set(text)
    assert r"evil\x1b[2J\u202e\ud800\r[red]x" in text
    assert len(shown(found(ERROR.model_copy(update={"says": "x" * 1_000_000})))) < 10_000


def test_what_is_printed_is_a_text():
    """Nothing is rich's markup: a stranger's name may have brackets."""
    folder = Path(__file__).parent.parent.parent / "cli"
    assert not [
        path.name
        for path in folder.glob("*.py")
        if re.search(r"rich\.markup|from_markup", path.read_text())
    ]
    file = io.StringIO()
    Console(file=file, width=80).print(table("[red]a\x1b[2J", ("x",), [["[red]a\ud800"]]))
    assert "[red]a\\x1b[2J " in file.getvalue() and "[red]a\\ud800 " in file.getvalue()


def test_a_command_names_the_checkpoint():
    assert with_path("Run `keepmtp fix PATH --out NEW` in PATH", "a b/c") == (
        "Run `keepmtp fix 'a b/c' --out NEW` in PATH"
    )


def by(vllm: str, tp: int = 1, **found) -> DryLoad:
    return LOAD.model_copy(update={"vllm": vllm, "tp": tp, **found})


def test_several_versions_are_a_table():
    """Each version, the oldest first: what is wrong, and the version that cures it; one that is
    cured later is named, and so is a gap.
    """
    silent = {"ok": False, "error": "lm_head.weight: is filled by nothing " * 9}
    stage = {"stage": "construct", "role": "draft", "type": "AttributeError", "words": "no x"}
    failed = {"ok": False, "error": "x: no", "failure": LoadFailure(**stage)}
    defect = failed | {
        "defect": "openPangu's draft: vllm #48848",
        "cures": ("layers.openpangu_layer",),
    }
    tried = (by("0.33.0"), by("0.31.0", 4, **defect), by("0.9.2", **silent), by("0.31.0"))
    assert_shows(
        plain(shown(found(dry=tried), 200)),
        "dry load: vLLM's own classes and loaders on meta tensors",
        "0.9.2 sm100 1 yes no lm_head.weight: is filled by nothing",
        "Cured in 0.31.0",
        "0.31.0 sm100 4 yes no openPangu's draft: vllm #48848 Loads with cures "
        "(layers.openpangu_layer) 0.31.0 sm100 1 yes yes 0.33.0 sm100 1 yes yes",
        "vLLM 0.33.0 is the oldest that loads and drafts it, of 0.9.2, 0.31.0 and 0.33.0",
    )
    alone = plain(shown(found(dry=(LOAD,)), 200))
    assert_shows(alone, "0.32.0 sm100 1 yes yes check passed out/x: no findings")
    assert serving(tried) == ["0.33.0"] and [each.vllm for each in newest(tried)] == ["0.33.0"]
    gap = (by("0.29.0"), by("0.30.0", **failed), by("0.31.0"))
    words = "0.29.0 is the oldest that loads and drafts it, of 0.29.0, 0.30.0 and 0.31.0"
    assert versions_in_short(gap) == f"{words}; 0.30.0 does not"
    assert cured_in(gap[1], gap) == "0.31.0" and not cured_in(gap[0], gap)
    assert versions_in_short(gap[1:2]) == ""
    bad = (gap[1], by("0.31.0", **failed))
    assert versions_in_short(bad) == "none of 0.30.0 and 0.31.0 loads and drafts it as it is"
    assert not cured_in(bad[0], bad)


@cases
def test_a_rule_says_which_versions_it_was_read_from(versions, severity, is_bound):
    """Where none of those that loaded it was read, the dry load decides."""
    accounts = [LoadAccount(path="out/x", load=by(version)) for version in versions]
    sglang = ERROR.model_copy(update={"runtime": "sglang"})
    for static in (ERROR, sglang):
        (told,) = with_loads(Checked(found(static)), accounts).data.findings
        is_ours = static is ERROR
        assert told.severity == (severity if is_ours else "error")
        words = "(a rule read from vLLM 0.31.0 to 0.33.0; of 9.9.1 the dry load tells)"
        assert told.says.endswith(words) == (is_bound and is_ours)


def test_what_some_versions_leave_unread_is_their_defect(tmp_path):
    """HY4's indexer, where transformers is newer than that vLLM."""
    folder = write_checkpoint(tmp_path / "hy4", *source_layout("hy4-preview"))
    name = "model.layers.1.self_attn.indexer.wk.weight"
    accounts = [
        LoadAccount(path=str(folder), load=by(version), unconsumed=(name,))
        for version in ("0.30.0", "0.32.0")
    ]
    defect, other = with_loads(examine(folder), accounts).data.findings
    assert (defect.rule, defect.where, other.rule) == ("vllm-defect", name, "dry-load")
    assert defect.cure == "Install transformers<5.18 beside it; vLLM 0.32.0 does not have it"


def test_what_keepmtp_cures_in_vllm_is_no_error(tmp_path, capsys):
    """`serve` and `eval` switch these cures on; one more finding, and it fails."""
    folder = write(tmp_path / "step", outputs_of(plan_of_recipe("step-3.5-flash")))
    words = "must not falsely use random initialization"
    stage = {"stage": "load", "role": "draft", "type": "ValueError", "words": words}
    failed = by("0.33.0", ok=False, failure=LoadFailure(**stage))
    cured = LoadAccount(path=str(folder), load=failed).with_cures(("step.draft_scales",))

    static = examine(folder)

    def ends(*accounts: LoadAccount, also: tuple[Finding, ...] = ()) -> tuple[int, str]:
        checked = with_loads(static.with_findings(*static.data.findings, *also), accounts)
        status = findings_of(checked, ("vllm",), as_json=False)
        return status, " ".join(capsys.readouterr().out.split())

    status, said = ends(cured)
    assert status == 0 and "error: " in said and "check passed" in said
    assert "a plain vLLM fails: it loads with keepmtp's cure step.draft_scales, which" in said
    assert ends(cured, cured.with_cures(()))[0] == 1, "on one GPU no cure helps"
    status, said = ends(cured, also=(ERROR,))
    assert status == 1 and "check failed" in said and "a plain vLLM" not in said


def test_a_version_without_a_draft_says_that_before_what_breaks_first(tmp_path):
    config, tensors = source_layout("longcat-flash-chat")
    other = config | {"model_type": "longcat_flash_ngram"}
    folder = write_checkpoint(tmp_path / "longcat", other, tensors)
    failure = LoadFailure(stage="config", role="", type="OSError", words="no image processor")
    loads = (by("0.33.0", ok=False, failure=failure), by("0.31.0"))
    accounts = [LoadAccount(path=str(folder), load=each) for each in loads]
    found = with_loads(examine(folder), accounts).data.findings
    (told,) = [finding for finding in found if finding.origin == "dry"]
    assert "vLLM 0.33.0 has no draft for 'longcat_flash_ngram'; it stops while" in told.says
    assert told.rule == "family" and told.cure.endswith("versions: 0.31.0")


def test_one_cause_on_several_gpus_is_one_finding():
    def on(gpu: str, tp: int, names: str):
        words = {"rule": "dry-load", "severity": "error", "says": "is cast", "cure": "Do"}
        own = [objection(where=name, cause="c", **words) for name in names]
        return LOAD.model_copy(update={"gpu": gpu, "tp": tp}), own

    other = objection(rule="no-kernel", severity="error", where="z", says="no kernel", cure="Do")
    sm120 = (LOAD.model_copy(update={"gpu": "sm120"}), [other])
    first, last = _once([on("sm90", 1, "ab"), on("sm100", 1, "abc"), on("sm90", 4, "a"), sm120])
    assert (first.where, first.count) == ("a", 3)
    assert first.says == "on sm90 at TP 1 and 4 and sm100 at TP 1: is cast"
    assert last.says == "on sm120 at TP 1: no kernel" and last.count == 1
    older = (by("0.31.0"), on("sm90", 1, "a")[1])
    first, last = _once([on("sm90", 1, "ab"), older, sm120])
    assert first.says.startswith("vLLM 0.31.0 on sm100 at TP 1 and vLLM 0.32.0 on sm90 at TP 1: is")
