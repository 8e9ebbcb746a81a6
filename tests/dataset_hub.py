"""The few routes of the Hub's API that `datasets` needs to stream a repository, org/data, from a folder on loopback."""

import json
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "d" * 40
_API, _FILES = "/api/datasets/org/data", "/datasets/org/data/resolve/"


class DatasetHub(BaseHTTPRequestHandler):
    """Answers for one folder: what it is, what lies in it, and its files by byte range."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *args, root: Path, **kwargs):
        self.root = root
        super().__init__(*args, **kwargs)

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path, _, query = self.path.partition("?")
        if path.startswith(f"{_API}/tree/"):
            folder = self.root / path.removeprefix(f"{_API}/tree/").partition("/")[2]
            found = sorted(folder.rglob("*") if "recursive=true" in query else folder.glob("*"))
            kinds = [{"type": "file" if each.is_file() else "directory", "path": str(each.relative_to(self.root)),
                      "oid": "0" * 40, "size": each.stat().st_size} for each in found]  # fmt: skip
            return self.reply(json.dumps(kinds).encode())
        if path.startswith(_API):
            files = [{"rfilename": str(each.relative_to(self.root))} for each in self.root.rglob("*.*")]
            about = {"id": "org/data", "sha": COMMIT, "siblings": files, "private": False, "tags": [],
                     "downloads": 0, "likes": 0}  # fmt: skip
            return self.reply(json.dumps(about).encode())
        file = self.root / path.removeprefix(_FILES).partition("/")[2]
        if path.startswith(_FILES) and file.is_file():
            return self.reply(file.read_bytes())
        self.send_response(404)
        self.send_header("X-Error-Code", "EntryNotFound" if "/org/data/" in path else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def reply(self, body: bytes):
        whole, wanted = body, self.headers.get("Range")
        self.send_response(206 if wanted else 200)
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            end = min(int(last or len(body) - 1), len(body) - 1)
            self.send_header("Content-Range", f"bytes {first}-{end}/{len(body)}")
            body = body[int(first) : end + 1]
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{zlib.crc32(whole):08x}"')  # files with the same one are one in the cache
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The endpoint to give as HF_ENDPOINT."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(DatasetHub, root=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
