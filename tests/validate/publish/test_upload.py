"""`keepmtp publish` against a Hub on loopback: what it refuses, what it sends, what it survives."""

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import cards
import hub as loopback
import measured
import pytest
from commands import captured, shell
from data_files import cases
from hub import FIRST_COMMIT, READ_ONLY, TOKEN, Fault, Hub, other_hash
from keepmtp.checkpoints.identity import file_sha256, identify
from keepmtp.cli import main
from keepmtp.recipes.errors import CheckpointError, GateError, RecipeError
from keepmtp.validate.publish import upload as publishing
from keepmtp.validate.publish.upload import prepare
from keepmtp.validate.report import card
from keepmtp.validate.report.report import refresh
from processes import until
from written_values import poke

REPO = "org/tiny-glm4-moe-MTP"
SHARD = "model-00001-of-00005.safetensors"
# httpx's word on how huggingface_hub 1.33 calls it to send a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A quantized checkpoint in five shards with report and card; gates as lax as its 60 questions
    need.
    """
    return cards.green(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy of `made` to publish, or to spoil."""
    for suffix in ("", ".report", ".card"):
        shutil.copytree(f"{made}{suffix}", tmp_path / f"{made.name}{suffix}")
    return tmp_path / made.name


@pytest.fixture
def hub(tmp_path_factory, tmp_path) -> Iterator[Hub]:
    with loopback.serving(tmp_path_factory.mktemp("hub")) as hub:
        yield hub
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), (
            f"the token is in {path}"
        )


def environment(hub: Hub, folder: Path, **more: str) -> dict[str, str]:
    return os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(folder.parent / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def measured_again(folder: Path, **choices: Any) -> None:
    """Report and card of what is in the folder now."""
    shutil.rmtree(f"{folder}.report")
    cards.evidence(folder, **choices)
    card.build(folder)


def words(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "keepmtp", "publish", str(folder), "--repo", REPO, *more]


def publish(hub: Hub, folder: Path, *more: str, **env: str) -> CompletedProcess[str]:
    """The real command, in a process of its own."""
    done = captured(
        words(folder, *more),
        env=environment(hub, folder, **env),
        stdin=subprocess.DEVNULL,
        timeout=300,
        status=0,
    )
    assert TOKEN not in done.stdout + done.stderr, done.stderr
    return done


@pytest.fixture
def publish_here(hub_at, hub, folder, monkeypatch, capsys) -> Callable[..., Any]:
    """The same command in this process, which is quicker where it is not the process that is
    tested.
    """
    hub_at(hub.endpoint)
    monkeypatch.setattr("sys.stdin", io.StringIO())

    def run_here(
        *more: str, code: int = 0, says: str = "", token: str = TOKEN, repo: str = REPO
    ) -> Any:
        """What it printed; its exit status is `code`, and it says that."""
        for name, value in {"HF_TOKEN": token, "HF_HOME": str(folder.parent / "home")}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(
            "huggingface_hub.constants.HF_TOKEN_PATH", str(folder.parent / "home" / "token")
        )
        monkeypatch.setattr("sys.argv", ["keepmtp", "publish", str(folder), "--repo", repo, *more])
        with pytest.raises(SystemExit) as ended:
            main.main()
        told = capsys.readouterr()
        assert not any(each and each in told.out + told.err for each in (TOKEN, token))
        done = told._replace(err=" ".join(told.err.split()))
        assert (ended.value.code or 0) == code and says in done.err, done
        return done

    return run_here


def whole(hub: Hub, folder: Path) -> None:
    """The repository holds the checkpoint and its card, byte for byte, and nothing else."""
    local = {
        path.relative_to(place).as_posix(): path
        for place in (folder, card.card_folder(folder))
        for path in place.rglob("*")
        if path.is_file()
    }
    sent = {name: path.read_bytes() for name, path in local.items()}
    sent |= card.verified_files(folder, repository=REPO)
    there = hub.files(REPO)
    assert there.pop(".gitattributes") and there == sent


def nothing_sent(hub: Hub) -> bool:
    return not any(line.startswith(("PUT", "POST")) for line in hub.requests)


def put(hub: Hub, path: Path) -> int:
    """Bytes that arrived for a file stored as a large one."""
    return hub.put[file_sha256(path)]


# --- What is refused before anything is sent ------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.few(3)
@cases
def test_other_bytes_than_were_measured_are_refused_by_name(
    publish_here, hub, folder, command, says
):
    shell(command, folder)
    ended = publish_here(code=2, says=says)
    assert hub.requests == []
    assert ".card" not in command or "hashing" not in ended.err, "known before every byte is read"


def test_a_flipped_bit_under_the_old_time_of_change_is_never_public(publish_here, hub, folder):
    """Its hash is remembered here; the Hub computes its own."""
    shard = folder / SHARD
    was = shard.stat()
    os.utime(shard, (0, 0))
    identify(folder, cache=Path(f"{folder}.report"))
    flip(shard)
    os.utime(shard, (0, 0))
    assert shard.stat().st_size == was.st_size
    ended = publish_here(
        "--public", "--yes", code=1, says=f"got {SHARD} has another size or hash there"
    )
    assert "It stays private." in ended.err and hub.repos[REPO].private


LOST = {"both": 20, "only_source": 35, "only_checkpoint": 0, "neither": 5}
FEW = {"both": 5, "only_source": 2, "only_checkpoint": 1, "neither": 1}


@pytest.mark.parametrize(
    "choices, verdict",
    [
        ({"answers": measured.Answers(**LOST)}, "regression"),
        ({"answers": measured.Answers(**FEW)}, "not measured"),
        ({"stations": frozenset({"check"})}, "not measured"),  # no server
    ],
)
def test_a_checkpoint_that_does_not_pass_is_refused(publish_here, hub, folder, choices, verdict):
    measured_again(folder, **choices)
    publish_here(
        "--public",
        "--yes",
        code=1,
        says=f"only a checkpoint that passes is published; got {verdict}",
    )
    assert hub.requests == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "ending, value, says",
    [
        (
            "layers.1.mlp.experts.0.down_proj.weight_global_scale",
            0.0,
            "is 0, and vLLM divides by it",
        ),
        (
            "layers.2.self_attn.o_proj.weight_scale",
            float("nan"),
            "element [0, 0] is infinite or NaN",
        ),
        ("layers.3.eh_proj.weight", 0.0, "holds zeros only"),
    ],
)
def test_a_broken_value_is_refused_though_the_report_is_green(
    publish_here, hub, folder, ending, value, says
):
    """What made the report did not look: the names and shapes of the checkpoint are right."""
    poke(folder, f"model.{ending}", value)
    measured_again(folder)
    wrong = "what is published must hold values that a model can compute with"
    done = publish_here(code=1, says=wrong)
    assert f"got model.{ending}" in done.err and says in done.err
    assert REPO not in hub.repos


def test_a_draft_of_its_own_is_published(hub, tmp_path):
    """Whole, or not at all: without a server's evidence, or where it has changed since."""
    folder = cards.draft(tmp_path / "draft")
    card.build(folder)
    publish(hub, folder)
    whole(hub, folder)
    text = hub.files(REPO)["README.md"].decode()
    assert f'"model":"{REPO}"' in text and "vllm serve tiny-glm4-moe" in text
    flip(folder / "model-00001-of-00001.safetensors")
    cure = f"measure these: `keepmtp eval TARGET --draft {folder}` and card"
    with pytest.raises(CheckpointError, match=f"got another model-00001-of-00001.*{cure}"):
        prepare(folder)
    shutil.rmtree(f"{folder}.report")
    folder = cards.draft(tmp_path / "other")
    Path(f"{folder}.report", "serve.json").unlink()
    refresh(Path(f"{folder}.report"))
    card.build(folder)
    says = "Not measured of both source and checkpoint: `keepmtp eval TARGET --draft DRAFT`"
    with pytest.raises(GateError, match=says):
        prepare(folder)


@cases
def test_a_name_that_the_hub_does_not_take_is_refused(name):
    with pytest.raises(RecipeError, match="--repo: must be ORG/NAME"):
        publishing.check_name(name)


def test_a_token_is_needed(publish_here, hub):
    publish_here(
        token="",
        code=2,
        says="needs a token with write access; got none. Set HF_TOKEN, or run `hf auth login`.",
    )
    assert hub.requests == []


def test_front_matter_that_the_hub_does_not_take_is_refused_before_a_file_is_sent(
    publish_here, hub
):
    answer = json.dumps({"errors": [{"message": '"license" must be one of [mit]'}]})
    hub.faults = [Fault("POST /api/validate-yaml", status=400, body=answer.encode())]
    publish_here(code=2, says='got 400: "license" must be one of [mit]. Check --repo and the card')
    assert not any(asked.startswith("PUT") for asked in hub.requests)


@pytest.mark.parametrize(
    "token, says",
    [
        ("hf_nobodyKnowsThisOne", "the Hub: the Hub must know the token; got 401"),
        (READ_ONLY, "the token must be allowed to write; got me's token for reading"),
    ],
)
def test_a_token_that_will_not_do_is_refused(publish_here, hub, token, says):
    publish_here(token=token, code=2, says=says)
    assert not hub.repos


@pytest.mark.parametrize("exists", [False, True])
def test_a_namespace_that_the_token_may_not_write_to(publish_here, hub, exists):
    if exists:
        hub.add("stranger/model")
    hub.writers.remove("org")
    publish_here(
        repo="stranger/model",
        code=2,
        says="stranger/model: the token must be allowed to write there; got 403",
    )
    assert not hub.put


def out_of_the_folder(folder: Path, name: str) -> None:
    """The file is moved away, and a link leads to it."""
    path, there = folder / name, folder.parent / "elsewhere" / name
    there.parent.mkdir(parents=True)
    path.rename(there)
    path.symlink_to(there)


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_a_link_is_not_followed(publish_here, hub, folder, name):
    out_of_the_folder(folder, name)
    for more in ([], ["--dry-run"]):
        publish_here(*more, code=2, says="only the folder's own files are published; got a link to")
    assert hub.requests == []


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [
        "id_ed25519",
        "sub/.env.json",
        "token.json",
    ],
)
def test_a_file_that_no_checkpoint_has_is_not_published(publish_here, hub, folder, name):
    """It was there when the checkpoint was measured, so it is of the report."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("mine")
    if name == "sub/.env.json":
        (folder / "sub" / "key.pem").write_text("mine")
    measured_again(folder)
    publish_here(code=2, says="only known files of a checkpoint are published; got")
    assert hub.requests == []


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_folder_and_repository_are_named_before_anything_else(publish_here, hub, folder, more):
    hub.add(REPO)
    ended = publish_here(*more)
    assert ended.err.startswith(f"folder {folder.resolve()} repository {hub.endpoint}/{REPO} ")
    assert f"on the Hub a private repository with 1 file, at commit {FIRST_COMMIT}" in ended.err
    (folder / "config.json").unlink()
    assert publish_here(*more, code=2).err.startswith(f"folder {folder.resolve()} ")


def test_a_token_is_not_sent_over_plain_http(publish_here, hub, hub_at):
    hub_at("http://hub.example")
    publish_here(code=2, says="HF_ENDPOINT: a token is sent by https only")


# --- Repositories that exist ----------------------------------------------------------------------


@pytest.mark.full
def test_a_repository_of_somebody_elses_is_only_added_to_on_request(publish_here, hub, folder):
    repo = hub.add(REPO)
    before = hub.commit(REPO, {"README.md": b"mine", "notes.txt": b"mine too"})
    ended = publish_here(
        code=2, says="must be empty or hold this checkpoint; got another README.md, notes.txt"
    )
    assert nothing_sent(hub)
    ended = publish_here("--update", "--json")
    told = json.loads(ended.out)
    assert told["other_files"] == ["notes.txt"] and told["private"] is True, ended
    there = hub.files(REPO)
    assert there["README.md"] == card.verified_files(folder, repository=REPO)["README.md"]
    assert f"vllm serve {REPO} " in there["README.md"].decode()
    assert there["notes.txt"] == b"mine too"
    assert repo.at(before)["README.md"].size == 4, "the history keeps what was replaced"


# --- What does not arrive as it was sent ----------------------------------------------------------


def test_weights_of_another_checkpoint_are_not_added_to(publish_here, hub):
    hub.add(REPO)
    hub.commit(REPO, {"left-over.safetensors": b"no header"})
    ended = publish_here(
        "--update", "--public", "--yes", code=2, says="must hold no weights of another checkpoint"
    )
    assert "got left-over.safetensors" in ended.err and hub.repos[REPO].private
    assert nothing_sent(hub)


def test_what_everybody_reads_gets_only_what_was_checked(publish_here, hub, folder):
    """Files are sent as a pull request, which is compared; the main branch stays as it was."""
    repo = hub.add(REPO, private=False)
    hub.faults = [Fault("GET .*/revision/", **other_hash(SHARD))]
    publish_here("--yes", code=1, says=f"{SHARD} has another size or hash there")
    assert repo.head == FIRST_COMMIT and [*repo.branches] == ["main", "refs/pr/1"]
    hub.faults = []
    told = json.loads(publish_here("--yes", "--json").out)
    assert told["pull_request"] == f"{hub.endpoint}/{REPO}/discussions/1", "it goes on"
    sent = {name: file.num_bytes for name, file in prepare(folder, repo=REPO).files.items()}
    request = repo.at(told["commit"])
    there = {name: blob.size for name, blob in request.items() if name in sent}
    assert sent == there and request[SHARD].path.read_bytes() == (folder / SHARD).read_bytes()
    assert repo.head == FIRST_COMMIT


@pytest.mark.full
def test_xet_sends_the_same_bytes(hub, folder):
    """hf_xet's own client, which stores chunks in a folder: no large file goes through the Hub's
    LFS.
    """

    def arrive() -> None:
        for path in (*folder.glob("*.safetensors"), *card.card_folder(folder).glob("*.png")):
            hub.store(path.read_bytes(), large=True)

    hub.faults = [Fault("POST .*/commit/", before=arrive)]
    ended = publish(hub, folder, "--json", "--public", "--yes", HF_HUB_DISABLE_XET="0")
    assert json.loads(ended.stdout)["private"] is False
    assert any("/xet-write-token/" in line for line in hub.requests) and not put(
        hub, folder / SHARD
    )
    stored = sum(path.stat().st_size for path in (hub.folder / "xet").rglob("*") if path.is_file())
    assert stored > (folder / SHARD).stat().st_size
    whole(hub, folder)


# --- Faults of the network ------------------------------------------------------------------------


def test_a_run_that_is_killed_continues(hub, folder):
    """kill -9 while one shard is under way: the others have arrived, and only that one is sent
    again.
    """
    held, shard = threading.Event(), folder / SHARD
    hub.faults = [Fault(f"PUT /lfs/{file_sha256(shard)}", after=200_000, hold=held)]
    process = subprocess.Popen(
        words(folder),
        env=environment(hub, folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    others = [path for path in folder.glob("*.safetensors") if path != shard]
    until(
        lambda: (
            put(hub, shard) >= 200_000
            and all((hub.folder / file_sha256(path)).exists() for path in others)
        ),
        seconds=120,
    )
    process.send_signal(signal.SIGKILL)
    process.wait()
    held.set()
    assert len(hub.repos[REPO].commits) == 1
    kinds = ("", ".report", ".card")
    assert {path.name for path in folder.parent.glob("tiny*")} == {
        f"{folder.name}{kind}" for kind in kinds
    }
    before = put(hub, shard)
    publish(hub, folder)
    assert [put(hub, path) for path in others] == [path.stat().st_size for path in others], (
        "sent once"
    )
    assert put(hub, shard) - before == shard.stat().st_size
    whole(hub, folder)


# --- Going public, and looking only ---------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("answer", ["n", "y"])
def test_going_public_is_asked_before_and_done_after(hub, folder, answer):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        words(folder, "--public"),
        env=environment(hub, folder),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    os.write(ours, f"{answer}\n".encode())
    said = process.communicate(timeout=300)[0]
    os.close(ours), os.close(theirs)
    assert f"{REPO} would be public. Go on? [y/N]" in said and TOKEN not in said
    if answer == "n":
        assert (
            process.returncode == 2 and "going public must be confirmed" in said and not hub.repos
        )
        return
    assert process.returncode == 0, said
    assert not hub.repos[REPO].private
    settings = next(
        number for number, line in enumerate(hub.requests) if line.endswith("/settings")
    )
    assert any("/revision/" in line for line in hub.requests[:settings]) and hub.requests[
        settings
    ].startswith("PUT")
    assert not any("/lfs/" in line for line in hub.requests[settings:])


def test_a_dry_run_shows_the_list_and_sends_nothing(publish_here, hub, folder):
    told = json.loads(publish_here("--dry-run", "--public", "--json", token="").out)
    assert told["there"] == "nothing was asked: no token" and hub.requests == []
    names = {file["name"] for file in told["files"]}
    assert {
        "config.json",
        SHARD,
        "keepmtp.json",
        "README.md",
        "report.json",
        "acceptance.png",
    } <= names
    assert all(file["sha256"] and file["bytes"] for file in told["files"])
    hub.add(REPO)
    hub.commit(
        REPO,
        {
            "config.json": (folder / "config.json").read_bytes(),
            "README.md": b"old",
            "notes": b"mine",
        },
    )
    seen = json.loads(publish_here("--dry-run", "--json").out)
    states = {file["name"]: file["on_the_hub"] for file in seen["files"]}
    assert (states["config.json"], states["README.md"], states[SHARD]) == ("same", "differs", "new")
    assert seen["other_files"] == ["notes"]
    table = publish_here("--dry-run").out
    assert SHARD in table and "differs" in table and "other_files notes" in table
    assert nothing_sent(hub)


# --- A pull request to the repository that it was made from ---------------------------------------


@pytest.fixture
def changed(hub, folder) -> Path:
    """The checkpoint as one that was made from the repository, where a shard is another."""
    edit_json(folder / "keepmtp.json", ("source", "name"), REPO)
    edit_json(folder / "keepmtp.json", ("source", "revision"), FIRST_COMMIT)
    measured_again(folder)
    before = folder.parent / "before"
    shutil.copytree(folder, before)
    flip(before / SHARD)
    (before / "keepmtp.json").unlink()
    (before / "notes.txt").write_text("the owner's")
    assert hub.mirror(REPO, before) == FIRST_COMMIT
    return folder


def edit_json(path: Path, place: tuple[str, str], value: str) -> None:
    told = json.loads(path.read_text())
    told[place[0]][place[1]] = value
    path.write_text(json.dumps(told))


def test_what_has_changed_is_proposed(publish_here, hub, changed):
    planned = json.loads(publish_here("--dry-run", "--json").out)["proposed"]
    assert {SHARD, "keepmtp.json", "README.md"} <= {*planned["files"]} and nothing_sent(hub)
    assert "config.json" not in planned["files"]
    publish_here(code=2, says="going public must be confirmed")
    told = json.loads(publish_here("--yes", "--json").out)
    repo = hub.repos[REPO]
    assert told["pull_request"] == f"{hub.endpoint}/{REPO}/discussions/1"
    assert told["uploaded_bytes"] == planned["bytes"] and told["other_files"] == ["notes.txt"]
    assert repo.head == FIRST_COMMIT, "the owner decides"
    proposed = repo.at("refs/pr/1")
    now = repo.at("main")
    assert {name for name in proposed if proposed[name] != now.get(name)} == {*planned["files"]}
    assert proposed[SHARD].sha256 == file_sha256(changed / SHARD)
    shards = [path for path in changed.glob("*.safetensors") if put(hub, path)]
    assert shards == [changed / SHARD], "what has not changed is not uploaded"


def test_a_request_of_the_same_files_is_not_made_again(publish_here, hub, changed):
    """The answer to the first one was lost; one of other files under the same title is another."""
    hub.faults = [Fault("POST .*/commit/main", spoils="truncate")]
    publish_here("--yes", code=2, says="the Hub must answer")
    repo = hub.repos[REPO]
    for _ in range(2):
        told = json.loads(publish_here("--yes", "--json").out)
        assert told["pull_request"] == f"{hub.endpoint}/{REPO}/discussions/1"
        assert told["commit"] == repo.branches["refs/pr/1"] and not told["uploaded_bytes"]
    files = repo.at("refs/pr/1")
    repo.add(files | {SHARD: hub.store(b"other")}, "refs/pr/1")
    again = json.loads(publish_here("--yes", "--json").out)
    assert again["pull_request"].endswith("/2")


def test_a_repository_that_has_moved_on_is_not_proposed_to(publish_here, hub, changed):
    hub.commit(REPO, {"notes.txt": b"newer"})
    for more in (["--dry-run"], ["--yes"]):
        publish_here(*more, code=2, says=f"must be at commit {FIRST_COMMIT}, which the checkpoint")
    assert nothing_sent(hub)


def test_without_a_token_nothing_is_said_of_what_would_change(publish_here, hub, changed):
    """Nobody has asked what is there."""
    told = json.loads(publish_here("--dry-run", "--json", token="").out)
    assert "proposed" not in told and hub.requests == []


def test_weights_that_the_checkpoint_has_no_more_are_not_left_beside_it(publish_here, hub, changed):
    """To delete them there first is no way out: then the repository has moved on."""
    hub.repos[REPO].commits[0]["old.safetensors"] = hub.store(b"old")
    says = "got old.safetensors. Publish it to a repository of its own"
    publish_here("--yes", code=2, says=says)
    assert nothing_sent(hub)


def test_a_request_makes_nothing_public(publish_here, hub, changed):
    publish_here("--public", "--yes", code=2, says="--public: is for a repository of your own")
    assert nothing_sent(hub)


def test_a_repository_that_moves_on_meanwhile_refuses(publish_here, hub, changed):
    repo = hub.repos[REPO]
    hub.faults = [Fault("POST .*/commit/main", before=lambda: hub.commit(REPO, {"a.txt": b"a"}))]
    publish_here("--yes", code=2, says="nobody else may write to it meanwhile; got 412")
    assert [*repo.branches] == ["main"]


def test_a_request_that_holds_other_bytes_is_told(publish_here, hub, changed):
    hub.faults = [Fault("GET .*/revision/", **other_hash(SHARD))]
    publish_here("--yes", code=1, says=f"got {SHARD} has another size or hash there")


def test_nothing_is_proposed_twice(publish_here, hub, changed):
    """Once the owner has taken it, also with further commits; a file that stays is no change."""
    for place in (changed, card.card_folder(changed)):
        for path in place.rglob("*"):
            if path.is_file():
                name = path.relative_to(place).as_posix()
                hub.repos[REPO].commits[0][name] = hub.store(path.read_bytes())
    for name, content in card.verified_files(changed, repository=REPO).items():
        hub.repos[REPO].commits[0][name] = hub.store(content)
    publish_here("--yes", code=2, says="must lack something; got every byte")
    hub.commit(REPO, {"notes.txt": b"newer"})
    publish_here("--yes", code=2, says="must lack something; got every byte")
