"""keepmtp.api: the page's examples run, the names are lazy, and the command line is built on
them.
"""

import inspect
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import get_type_hints

import pytest
from commands import ROOT, captured, keepmtp
from keepmtp import api
from killed import small_recipe

PAGE = ROOT / "docs" / "api.md"
HEAVY = {"huggingface_hub", "httpx", "numpy", "pydantic", "rich", "torch", "transformers", "yaml"}


def loaded(code: str) -> set[str]:
    words = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    done = captured(words, check=True)
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


def test_the_examples_of_the_page_run(tmp_path, monkeypatch, capsys):
    """The README's too: top to bottom, in one folder; a command in a comment is run as a command."""
    monkeypatch.chdir(tmp_path)
    known: dict[str, object] = {}
    pages = (ROOT / "README.md").read_text() + PAGE.read_text()
    parts = re.findall(r"<!-- (keepmtp [^\n]*) -->|```python\n(.*?)```", pages, re.DOTALL)
    assert len(parts) >= 8
    for command, code in parts:
        if command:
            assert keepmtp(*command.split()[1:], cwd=tmp_path).returncode == 0
        else:
            exec(compile(code, str(PAGE), "exec"), known)
    said = capsys.readouterr().out
    assert "tensors of the MTP block kept" in said and "must be a variant of tiny-glm4-moe" in said


def test_a_back_end_that_is_not_installed_is_one_sentence(tmp_path, monkeypatch):
    """Before any work."""
    recipe = small_recipe(tmp_path, "tiny-glm4-moe.nvfp4", algorithm="mse")
    monkeypatch.chdir(ROOT)

    def version_without(name: str) -> str:
        if name == "nvidia-modelopt":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("keepmtp.recipes.extras.version", version_without)
    with pytest.raises(
        api.KeepMTPError, match=r"needs keepmtp's `modelopt` extra; got no nvidia-modelopt\. Run "
    ):
        api.quantize(api.plan(str(recipe)), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == [recipe.name]


@pytest.mark.parametrize("name", ["plan", "quantize", "load_recipe", "report", "card"])
def test_a_value_of_another_type_is_one_sentence(name, tmp_path):
    with pytest.raises(api.KeepMTPError, match=r": must be a .*; got 7\. "):
        getattr(api, name)(7, *[tmp_path] * (name == "quantize"))


def test_names_and_values_are_short_to_look_at():
    assert set(api.__all__) <= set(dir(api))
    said = repr(api.plan("tiny-glm4-moe", scheme="fp8-dynamic"))
    assert said.startswith("<Plan tiny-glm4-moe") and len(said) < 200


def test_every_name_is_on_the_page_and_has_types():
    text = PAGE.read_text()
    assert [name for name in api.__all__ if f"`{name}" not in text] == []
    for name in api.__all__:
        value = getattr(api, name)
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            given = [each.annotation for each in signature.parameters.values()]
            assert inspect.Signature.empty not in (signature.return_annotation, *given)
    assert get_type_hints(api.KeepMTPError.at)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        api.nothing  # noqa: B018


def test_importing_it_loads_nothing():
    assert not HEAVY & loaded("import keepmtp.api")
    assert not {"torch", "transformers"} & loaded(
        "from keepmtp.api import Plan, Report, Recipe, CheckData, FinishedRun"
    )


@pytest.mark.parametrize("file", ["options", "quantize", "check", "card"])
def test_the_command_line_is_built_on_it(file):
    called = re.findall(r"\bapi\.(\w+)\(", (ROOT / "cli" / f"{file}.py").read_text())
    assert called and set(called) <= set(api.__all__)


def test_what_has_nothing_to_judge_is_raised():
    with pytest.raises(api.KeepMTPError, match="a checkpoint is a folder"):
        api.check("nowhere/at/all")


def test_a_plan_carries_the_text_of_a_users_own_recipe(tmp_path):
    """The checkpoint gets the file as it was written, comments included."""
    shipped = api.plan("tiny-glm4-moe.w4a16-fp8").recipe_text
    (tmp_path / "mine.yaml").write_text(f"# mine\n{shipped}")
    run = api.quantize(api.plan(str(tmp_path / "mine.yaml")), tmp_path / "out")
    assert (run.out / "recipe.yaml").read_text().startswith("# mine\n")
