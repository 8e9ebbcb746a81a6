"""How huggingface_hub talks: deadlines, and where a token goes (checkpoints/hub_client.py)."""

import threading
import time
from collections.abc import Iterator

import hub as loopback
import pytest
from hub import TOKEN, Fault, Hub
from huggingface_hub import close_session, get_session
from keepmtp.checkpoints import hub_client
from keepmtp.checkpoints.hub import dataset_commit
from keepmtp.checkpoints.source import open_source
from keepmtp.recipes.errors import NoCheckpointError, RecipeError


@pytest.fixture
def hub(hub_at, tmp_path, monkeypatch) -> Iterator[Hub]:
    monkeypatch.setenv("KEEPMTP_HUB_TIMEOUT", "0.3")
    with loopback.serving(tmp_path / "hub") as hub:
        hub.add("org/model", private=False)
        hub_at(hub.endpoint)
        hub_client.install()
        yield hub
    close_session()


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://huggingface.co",
        "http://localhost.evil.org",
        "ftp://huggingface.co",
        "huggingface.co",
        "https://me:secret@huggingface.co",
        "",
    ],
)
def test_a_token_is_sent_by_https_only(endpoint):
    with pytest.raises(RecipeError, match="HF_ENDPOINT: a token is sent by https only") as refusal:
        hub_client.refuse_endpoint(endpoint)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize(
    "endpoint", ["https://huggingface.co", "https://hub.corp:8443", "http://127.0.0.1:8000"]
)
def test_an_endpoint_that_will_do(endpoint):
    hub_client.refuse_endpoint(endpoint)


@pytest.mark.parametrize("value", ["soon", "0", "nan", "1e9"])
def test_a_deadline_is_a_number_of_seconds(monkeypatch, value):
    monkeypatch.setenv("KEEPMTP_HUB_TIMEOUT", value)
    with pytest.raises(RecipeError, match="KEEPMTP_HUB_TIMEOUT: must be a number of seconds"):
        hub_client.install()


def test_the_token_stays_with_the_hub(hub, tmp_path):
    """The same client, which the Hub's answer sends elsewhere: to a page, to a redirect's
    target.
    """
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with loopback.serving(tmp_path / "other") as other:
        other.faults = [Fault(".", status=418, times=9)]  # it repeats what it was told
        hub.faults = [Fault("resolve", status=307, headers={"Location": f"{other.endpoint}/cdn"})]
        direct = get_session().get(f"{other.endpoint}/api/models", headers=headers)
        redirected = get_session().get(f"{hub.endpoint}/org/model/resolve/main/a", headers=headers)
        home = get_session().get(f"{hub.endpoint}/api/whoami-v2", headers=headers)
    assert home.json()["name"] == "me"
    assert direct.json()["error"] == redirected.json()["error"] == "sent with None"


def test_a_proxy_does_not_read_what_goes_to_this_machine(hub, tmp_path, monkeypatch):
    with loopback.serving(tmp_path / "proxy") as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.endpoint)
        monkeypatch.delenv("NO_PROXY", raising=False)
        hub_client.install()
        answer = get_session().get(
            f"{hub.endpoint}/api/whoami-v2", headers={"Authorization": f"Bearer {TOKEN}"}
        )
    assert answer.json()["name"] == "me" and proxy.requests == []


@pytest.mark.parametrize(
    "ask", [open_source, lambda name: dataset_commit(name, "main", "calibration.dataset")]
)
@pytest.mark.parametrize(
    "fault", [{"spoils": "drip"}, {"spoils": "headers"}, {"before": bool, "hold": True}]
)
def test_a_hub_that_does_not_end_its_answer(hub, fault, ask):
    """`check org/model` too: one sentence, and in time."""
    end = threading.Event()
    hub.faults = [Fault("GET", times=99, **(fault | ({"hold": end} if "hold" in fault else {})))]
    start = time.monotonic()
    with pytest.raises((NoCheckpointError, RecipeError), match="the Hub must"):
        ask("org/model")
    end.set()
    assert time.monotonic() - start < 5


def test_a_long_answer_may_take_long(hub, tmp_path):
    """What comes at a usable speed is waited for, however long it is."""
    hub.commit("org/model", {"large": bytes(20_000)})
    hub.faults = [Fault("resolve", before=lambda: time.sleep(0.2))]
    hub_client.PATIENCE.seconds = 0.3
    assert len(get_session().get(f"{hub.endpoint}/org/model/resolve/main/large").content) == 20_000


def test_a_stop_ends_what_waits_in_other_threads(hub):
    end, ended = threading.Event(), []
    hub_client.PATIENCE.seconds = 60
    hub.faults = [Fault("GET", before=bool, hold=end)]

    def ask() -> None:
        with pytest.raises(hub_client.HubError, match="nothing is sent after a stop"):
            get_session().get(f"{hub.endpoint}/api/whoami-v2")
        ended.append(time.monotonic())

    thread = threading.Thread(target=ask)
    thread.start()
    while not hub.requests:
        time.sleep(0.01)
    start = time.monotonic()
    hub_client.PATIENCE.stop()
    thread.join(10)
    end.set()
    hub_client.PATIENCE.stopped.clear()
    assert ended and ended[0] - start < 2
