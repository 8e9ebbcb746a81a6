"""How the suite is shared among worker processes; and the Hub, spoken on loopback, for tests that read a repository.

A file stays on one worker, since its fixtures are what takes long: `make test` says --dist loadfile.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

TESTS = Path(__file__).parent
# Of a worker and what it starts: llm-compressor and two models in one, two vLLM servers of 1.5 GiB in another.
WORKER_GIB = 5
# What takes half a minute and more, longest first; the rest follows in order.
LONG = (
    "vllm/test_serve.py", "vllm/test_gsm8k.py", "vllm/test_matrix.py", "vllm/test_draft_logits.py",
    "vllm/test_tiny_models.py", "vllm/test_acceptance_without_server.py", "vllm/test_check_on.py",
    "vllm/test_dry_corpus.py", "vllm/test_dry_names.py", "test_publish.py", "test_calibrate.py",
    "test_inference_mode.py", "test_ranks.py", "test_end_to_end.py", "test_llmcompressor_backend.py", "test_mtp.py",
    "test_evaluate.py", "test_static.py",
)  # fmt: skip

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before anything imports torch. Workers fill the cores by themselves, and what they start inherits this.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers() -> int:
    """For `-n auto`: one a core that this process may use, as many as memory holds."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(len(os.sched_getaffinity(0)), int(gib / WORKER_GIB)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first where workers share the suite: one that starts last leaves the others idle."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        places = {TESTS / name: place for place, name in enumerate(LONG)}
        items.sort(key=lambda item: places.get(item.path, len(places)))


class Hub(SimpleHTTPRequestHandler):
    """The few routes of the Hub's API that reading a repository needs, with range requests."""

    requests: ClassVar[list[str]] = []

    def __init__(self, *args, root: Path, **kwargs):
        self.root = root
        super().__init__(*args, **kwargs)

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/model"):
            files = [{"rfilename": str(p.relative_to(self.root))} for p in self.root.rglob("*") if p.is_file()]
            if "/tree/" in path:
                files = [{"type": "file", "path": f["rfilename"], "oid": "0" * 40,
                          "size": (self.root / f["rfilename"]).stat().st_size} for f in files]  # fmt: skip
                return self.reply(json.dumps(files).encode(), "application/json")
            body = {"id": "org/model", "sha": "c" * 40, "siblings": files, "private": False, "tags": [],
                    "downloads": 0, "likes": 0}  # fmt: skip
            return self.reply(json.dumps(body).encode(), "application/json")
        if path.startswith("/org/model/resolve/"):
            file = self.root / path.split("/", 5)[5]
            if file.is_file():
                return self.reply(file.read_bytes(), "application/octet-stream", etag=f'"{file.name}"')
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound" if path.startswith("/org/model") else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def reply(self, body: bytes, kind: str, etag: str = ""):
        wanted = self.headers.get("Range")
        self.send_response(206 if wanted else 200)
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last or len(body) - 1), len(body) - 1)
            self.send_header("Content-Range", f"bytes {first}-{end}/{len(body)}")
            body = body[int(first) : end + 1]
        Hub.requests.append(f"{self.command} {self.path} {wanted or ''}")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if etag:
            self.send_header("ETag", etag)
            self.send_header("X-Repo-Commit", "c" * 40)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub_at(monkeypatch, tmp_path):
    """Points huggingface_hub at an endpoint; its constants were read from the environment when it was imported."""
    from huggingface_hub import constants, hf_api

    def point(endpoint: str) -> None:
        for holder in (constants, hf_api):
            monkeypatch.setattr(holder, "ENDPOINT", endpoint, raising=False)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    return point


@pytest.fixture
def serve_hub(hub_at) -> Iterator[Callable[[Path], list[str]]]:
    """Serves a folder as the repository org/model; returns the list that the requests are noted in."""
    servers = []

    def serve(folder: Path) -> list[str]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, root=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        Hub.requests.clear()
        hub_at(f"http://127.0.0.1:{server.server_port}")
        return Hub.requests

    yield serve
    for server in servers:
        server.shutdown()
