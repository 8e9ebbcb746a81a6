"""A finding as people see it: a block whose cure can be pasted, whatever the width, and whoever
made the names.
"""

import io
import json
import re
from pathlib import Path

import pytest
from commands import keepmtp
from keepmtp.cli.findings import pasted, show, with_path
from keepmtp.cli.tables import table
from keepmtp.validate.dryload.check_on import _once
from keepmtp.validate.facts.dry_load import DryLoad, KernelUse, LoadedModel
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
KERNELS = (
    KernelUse(
        layer="L",
        method="M",
        kernel="TrtLlmBf16Experts",
        count=58,
        where="x",
        outcome="not judged: x",
    ),
)
LOAD = DryLoad(
    gpu="sm100",
    tp=1,
    k=1,
    ok=True,
    target=LoadedModel(cls="Glm4MoeForCausalLM", num_params=1_458, num_written=1_458),
    draft=LoadedModel(
        cls="Glm4MoeMTP", num_params=17, num_written=17, shared=("lm_head.weight",), kernels=KERNELS
    ),
)


def found(*findings: Finding, path: str = "out/x", **kept) -> CheckData:
    return CheckData(path=path, facts=CheckpointFacts(), findings=findings, **kept)


def shown(data: CheckData, width: int | None = None) -> str:
    """On a terminal of this width, or in a pipe."""
    file = io.StringIO()
    show(
        Console(file=file)
        if width is None
        else Console(file=file, force_terminal=True, width=width),
        data,
    )
    return file.getvalue()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("width", [40, 80, 200, None])
def test_a_cure_is_never_broken(width):
    lines = plain(shown(found(ERROR), width)).splitlines()
    assert (
        lines[0] == "error: model.layers.61.mtp_block.mlp.experts.0.down_proj.weight and 1,535 more"
    )
    assert f"  cure: {CURE}" in lines
    assert [line.strip() for line in lines[-4:-2]] == [json.dumps(PATTERN), COMMAND]
    assert " ".join(lines[1 : lines.index(f"  cure: {CURE}")]).split() == SAYS.split(), (
        "between words only"
    )
    assert lines[-1] == "check failed out/x: 1 error"


def test_what_will_happen_fits_the_terminal_and_is_one_line_in_a_pipe():
    for width in (80, 200):
        said = plain(shown(found(ERROR), width)).splitlines()[1:-5]
        assert said and max(map(len, said)) <= min(width, 120)
    assert f"  {SAYS.strip()}" in shown(found(ERROR)).splitlines()


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
    long = ERROR.model_copy(update={"says": "x" * 1_000_000})
    assert len(shown(found(long))) < 10_000


@pytest.mark.full
def test_a_strangers_folder_prints_no_escape(tmp_path):
    """Every verb that reads headers, end to end: a tensor, the folder and a file with escapes in
    their names.
    """
    config, tensors = source_layout("glm-4.7", size="tiny")
    hostile = "model.layers.0.\x1b[2Jevil\u202e.weight"
    folder = write_checkpoint(
        tmp_path / "a\x1b[2J[bold]b", config, tensors | {hostile: next(iter(tensors.values()))}
    )
    (folder / "x\x1b[31m.json").write_text("{}")
    said = ""
    for words in (("check",), ("plan", "glm-4.7", "--source"), ("quantize", "glm-4.7", "--source")):
        done = keepmtp(*words, str(folder), cwd=tmp_path)
        assert "Traceback" not in done.stderr and done.returncode in (0, 1, 2)
        said += done.stdout + done.stderr
    assert not {"\x1b", "\u202e"} & set(said) and "\\x1b[2J" in said


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


@pytest.mark.parametrize("width", [40, 80, 200, None])
def test_dry_loads_need_no_table(width):
    text = plain(shown(found(dry=(LOAD,)), width))
    assert "    target  Glm4MoeForCausalLM: 1,458 of 1,458 filled\n" in text
    draft = (
        "17 of 17 filled; shared with the target: lm_head.weight; kernels: 58 TrtLlmBf16Experts?"
    )
    assert f"    draft   Glm4MoeMTP: {draft}\n" in text
    assert text.endswith("check passed out/x: no findings\n")


def test_warnings_alone_pass():
    warning = ERROR.model_copy(update={"severity": "warning"})
    assert shown(found(warning, warning)).endswith("check passed out/x: 2 warnings\n")


def test_a_command_names_the_checkpoint():
    assert with_path("Run `keepmtp graft PATH --out NEW` in PATH", "a b/c") == (
        "Run `keepmtp graft 'a b/c' --out NEW` in PATH"
    )


def test_what_can_be_pasted():
    assert pasted("Run `keepmtp doctor`; see `config.json`") == ["keepmtp doctor"]
    wanted = '{"num_bits": 8, "block": {"a": true}}'
    assert json.loads(pasted(f"Set input_activations to {wanted}")[0])["block"] == {"a": True}
    assert pasted("Write vLLM's name, or the release's") == []


def test_one_cause_on_several_gpus_is_one_finding():
    def on(gpu: str, tp: int, *names: str):
        own = [
            objection(
                rule="dry-load", severity="error", where=n, says="is cast", cure="Do", cause="c"
            )
            for n in names
        ]
        return LOAD.model_copy(update={"gpu": gpu, "tp": tp}), own

    other = objection(rule="no-kernel", severity="error", where="z", says="no kernel", cure="Do")
    sm120 = (LOAD.model_copy(update={"gpu": "sm120"}), [other])
    first, last = _once(
        [on("sm90", 1, "a", "b"), on("sm100", 1, "a", "b", "c"), on("sm90", 4, "a"), sm120]
    )
    assert (first.where, first.count) == ("a", 3)
    assert first.says == "on sm90 at TP 1 and 4 and sm100 at TP 1: is cast"
    assert last.says == "on sm120 at TP 1: no kernel" and last.count == 1


def test_mtp_layers_that_are_not_built_are_a_line_of_the_dry_load():
    inkling, other = (
        CheckpointFacts(family=name, num_mtp_layers=8) for name in ("inkling_mm_model", "glm4_moe")
    )
    words = "7 MTP layers are not built at k=1: vLLM leaves their tensors alone"
    assert words in shown(found(dry=(LOAD,)).model_copy(update={"facts": inkling}))
    assert "not built" not in shown(found(dry=(LOAD,)).model_copy(update={"facts": other}))


def test_layers_that_follow_k_are_told_where_nothing_was_loaded():
    facts = CheckpointFacts(family="inkling_mm_model", num_mtp_layers=8)
    words = "vLLM builds an MTP layer for each drafted token: -k up to 8"
    assert words in shown(found().model_copy(update={"facts": facts}))
    assert words not in shown(found())
