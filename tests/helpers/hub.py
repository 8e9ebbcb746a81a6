"""A Hub on loopback: repositories of models can be made, written to and read, datasets read, with
faults on request.

It speaks what huggingface_hub 1.33 and `datasets` ask with HF_HUB_DISABLE_XET=1: LFS in one piece
or in parts, commits, branches, settings, trees, byte ranges. With Xet it gives hf_xet a folder of
this machine to store chunks in.
"""

import base64
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qs, unquote

TOKEN = "hf_loopbackSecretThatNobodyMayPrint"
READ_ONLY = "hf_loopbackTokenForReading"
FIRST_COMMIT = f"{1:040x}"
"""Of every repository."""
DRIP_SECONDS = 0.05
"""Between two bytes of an answer that drips."""
_LARGE = (".safetensors", ".png")


@dataclass
class Fault:
    """What happens to the next `times` requests whose "METHOD /path" the pattern `to` finds.

    Attributes:
        status: the answer; 0: none, the connection is cut after `after` bytes of the request's
            body.
        headers: of the answer.
        hold: cut, or answer, only when this is set.
        skip: so many such requests are answered as they should be first.
        body: the answer's, in place of an error's words.
        spoils: the right answer is sent, but otherwise: "drip" a byte at a time, "headers" that
            drip and do not end, "truncate" to the half of what its header says, "rewrite" as
            `rewrite` makes it of the right body.
        before: called when the request is there, and before it is answered.
    """

    to: str
    status: int = 0
    times: int = 1
    headers: Mapping[str, str] = field(default_factory=dict)
    after: int = 0
    hold: threading.Event | None = None
    skip: int = 0
    body: bytes | None = None
    spoils: Literal["", "drip", "headers", "truncate", "rewrite"] = ""
    rewrite: Callable[[bytes], bytes] = bytes
    before: Callable[[], object] | None = None

    def is_cut(self) -> bool:
        """The connection ends without an answer."""
        return not self.status and not self.spoils and self.before is None


@dataclass
class Blob:
    """A file of a commit: git's hash, and the SHA-256 of a large one; `path` of one whose bytes are
    elsewhere.
    """

    oid: str
    size: int
    sha256: str = ""
    path: Path | None = None


class Repo:
    """Commits in the order of their making, and the newest of each branch."""

    def __init__(self, *, private: bool) -> None:
        self.private = private
        self.commits: list[dict[str, Blob]] = []
        self.branches: dict[str, str] = {}
        self.titles: dict[str, str] = {}  # of pull requests, by branch

    @property
    def head(self) -> str:
        return self.branches["main"]

    def name(self, revision: str) -> str:
        """The commit that a revision means; "" if there is none."""
        return self.branches.get(revision) or (
            revision if re.fullmatch("[0-9a-f]{40}", revision) else ""
        )

    def at(self, revision: str) -> dict[str, Blob]:
        return self.commits[int(self.name(revision), 16) - 1]

    def add(self, files: dict[str, Blob], branch: str = "main") -> str:
        self.commits.append(files)
        self.branches[branch] = f"{len(self.commits):040x}"
        return self.branches[branch]


class Hub:
    """The server's state; stored bytes lie in `folder` by their hash.

    Attributes:
        repos: by name, ORG/NAME, a dataset's with `datasets/` before it.
        writers: namespaces that TOKEN may write to.
        part_bytes: larger files are sent in parts of this size.
        faults: taken in order.
        requests: "METHOD /path" of each, and the range where one was asked for.
        authorizations: what it was sent to know who asks.
        put: body bytes that arrived for each large file, by SHA-256.
        sent_by_xet: files that may come by Xet, by SHA-256; their chunks go to a folder here and
            not through the Hub.
        leads_elsewhere: a large file is asked for at another address, which the Hub answers with.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repos: dict[str, Repo] = {}
        self.writers = ["me", "org"]
        self.part_bytes = 1 << 40
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.authorizations: list[str] = []
        self.put: Counter[str] = Counter()
        self.sent_by_xet: dict[str, Path] = {}
        self.endpoint = ""
        self.leads_elsewhere = False
        self.lock = threading.Lock()

    def add(self, name: str, *, private: bool = True) -> Repo:
        """A repository as the Hub makes it: with a .gitattributes."""
        repo = self.repos[name] = Repo(private=private)
        self.commit(name, {".gitattributes": b"*.safetensors filter=lfs\n"})
        return repo

    def mirror(self, name: str, folder: Path) -> str:
        """A public repository that holds a folder's files as they are now; returns the commit."""
        self.repos.setdefault(name, Repo(private=False))
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return self.commit(
            name, {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
        )

    def link(self, name: str, folder: Path) -> str:
        """`mirror`, for files that are mostly holes: only the bytes that are asked for are read,
        where they are.
        """
        repo = self.repos.setdefault(name, Repo(private=False))
        found = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
        oids = {file: hashlib.sha1(file.encode()).hexdigest() for file in found}
        blobs = {
            file: Blob(oid=oids[file], size=path.stat().st_size, path=path)
            for file, path in found.items()
        }
        return repo.add(blobs)

    def commit(self, name: str, files: Mapping[str, bytes]) -> str:
        """Somebody's commit of small files."""
        repo = self.repos[name]
        before = repo.at("main") if repo.commits else {}
        return repo.add(before | {path: self.store(content) for path, content in files.items()})

    def store(self, content: bytes, *, large: bool = False) -> Blob:
        """Keep bytes under their hash."""
        sha256, size = hashlib.sha256(content).hexdigest(), len(content)
        shown = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize %d\n" % (
            sha256.encode(),
            size,
        )
        git = shown if large else content
        oid = hashlib.sha1(b"blob %d\0%b" % (len(git), git)).hexdigest()
        (self.folder / (sha256 if large else oid)).write_bytes(content)
        return Blob(oid=oid, size=size, sha256=sha256 if large else "")

    def read(self, name: str, path: str) -> bytes:
        """A file as it is now."""
        blob = self.repos[name].at("main")[path]
        return (self.folder / (blob.sha256 or blob.oid)).read_bytes()

    def by_sha256(self, sha256: str) -> Path:
        """The bytes of a large file; those of one that came by Xet are known from the file that was
        sent.
        """
        return self.sent_by_xet.get(sha256, self.folder / sha256)

    def spoil(self, name: str) -> None:
        """The next upload of one file is stored with other bytes than were sent, as the Hub then
        says itself.
        """
        self._spoilt = name

    _spoilt = ""

    def stored(self, path: str, blob: Blob) -> Blob:
        if path != self._spoilt:
            return blob
        content = self.by_sha256(blob.sha256).read_bytes()
        return self.store(content[:-1] + bytes([content[-1] ^ 1]), large=True)


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """A Hub whose `endpoint` is for HF_ENDPOINT."""
    folder.mkdir(exist_ok=True)
    hub = Hub(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub=hub))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Cut(Exception):
    """The connection is to be cut without an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms between its header and its body

    def __init__(self, *args: Any, hub: Hub, **kwargs: Any) -> None:
        self.hub = hub
        self.fault: Fault | None = None
        super().__init__(*args, **kwargs)

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.path, _, self.query = self.path.partition("?")
        self.path = unquote(self.path)
        line = f"{self.command} {self.path}"
        with self.hub.lock:
            self.hub.authorizations += self.headers.get_all("Authorization", [])
            self.hub.requests.append(" ".join(filter(None, (line, self.headers.get("Range")))))
            fault = self.fault = self._fault(line)
        try:
            body = self._body(fault)
            if fault and fault.before:
                fault.before()
            if fault and fault.hold:
                fault.hold.wait(60)
            if fault and fault.status and fault.body is not None:
                return self._send(
                    fault.status,
                    fault.body,
                    {"Content-Type": "application/json", **fault.headers},
                )
            if fault and fault.status:
                # a server may say what it was told
                echo = f"sent with {self.headers.get('Authorization')}"
                return self._say(
                    fault.status,
                    {"error": echo},
                    {"X-HF-Warning": f"echo; {echo}", **fault.headers},
                )
            self._answer(body)
        except (_Cut, ConnectionError):
            self.close_connection = True

    def _fault(self, line: str) -> Fault | None:
        for fault in self.hub.faults:
            if fault.times and re.search(fault.to, line):
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _body(self, fault: Fault | None) -> bytes:
        left = int(self.headers.get("Content-Length", 0))
        cut = fault is not None and fault.is_cut()
        sha256 = (
            self.path.split("/")[2]
            if self.path.startswith("/lfs/") and self.command == "PUT"
            else ""
        )
        body = b""
        while left and (chunk := self.rfile.read(min(left, 1 << 16))):
            body += chunk
            left -= len(chunk)
            self.hub.put[sha256] += len(chunk)
            if cut and len(body) >= fault.after:
                break
        if cut and fault.hold:
            fault.hold.wait(60)
        if cut or left:
            raise _Cut
        return body

    def _answer(self, body: bytes) -> None:
        token = self._token()
        if token not in ("", TOKEN, READ_ONLY):
            return self._say(
                401,
                {"error": "Invalid credentials in Authorization header"},
                {"X-Error-Message": "Invalid credentials in Authorization header"},
            )
        for method, pattern, answer in _ROUTES:
            if self.command in method and (found := re.fullmatch(pattern, self.path)):
                told = found.groupdict()
                if "repo" in told:
                    repo = self.hub.repos.get(told["repo"])
                    if repo is None or (repo.private and not token):
                        return self._say(
                            404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
                        )
                    if "revision" in told and not repo.name(told["revision"] or "main"):
                        return self._say(
                            404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
                        )
                    is_write = answer in _WRITES
                    owner = told["repo"].split("/")[0]
                    if is_write and (token != TOKEN or owner not in self.hub.writers):
                        return self._say(403, {"error": "You have no write access"})
                return answer(self, body, **told)
        self._say(
            404,
            {"error": f"no route for {self.command} {self.path}"},
            {"X-Error-Code": "EntryNotFound"},
        )

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _whoami(self, _: bytes) -> None:
        role = "read" if self._token() == READ_ONLY else "write"
        if not self._token():
            return self._say(401, {"error": "Unauthorized"})
        auth = {"type": "access_token", "accessToken": {"displayName": "t", "role": role}}
        self._say(200, {"type": "user", "name": "me", "orgs": [{"name": "org"}], "auth": auth})

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] not in self.hub.writers:
            return self._say(
                403,
                {
                    "error": f"You don't have the rights to create a model under {name.split('/')[0]}"
                },
            )
        if name in self.hub.repos:
            return self._say(409, {"error": "You already created this model repo"})
        self.hub.add(name, private=asked.get("visibility") == "private")
        self._say(200, {"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name})

    def _validate_yaml(self, _: bytes) -> None:
        self._say(200, {"errors": [], "warnings": []})

    def _info(self, _: bytes, *, repo: str, revision: str | None) -> None:
        found = self.hub.repos[repo]
        commit = found.name(revision or "main")
        files = []
        for path, blob in found.at(commit).items():
            large = {"sha256": blob.sha256, "size": blob.size, "pointerSize": 130}
            lfs = {"lfs": large} if blob.sha256 else {}
            files.append({"rfilename": path, "size": blob.size, "blobId": blob.oid, **lfs})
        self._say(
            200,
            {
                "id": repo,
                "sha": commit,
                "siblings": files,
                "private": found.private,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            },
        )

    def _tree(self, _: bytes, *, repo: str, revision: str, below: str | None) -> None:
        start = f"{below.strip('/')}/" if below and below.strip("/") else ""
        files = {
            path: blob
            for path, blob in self.hub.repos[repo].at(revision).items()
            if path.startswith(start)
        }
        folders: set[str] = set()
        if "recursive=true" not in self.query.lower():
            folders = {
                start + path.removeprefix(start).partition("/")[0] for path in files
            } - files.keys()
            files = {
                path: blob for path, blob in files.items() if "/" not in path.removeprefix(start)
            }
        listed = [
            {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
            for path in sorted(folders)
        ]
        self._say(200, listed + [_entry(path, blob) for path, blob in files.items()])

    def _paths_info(self, body: bytes, *, repo: str, revision: str) -> None:
        there = self.hub.repos[repo].at(revision)
        self._say(
            200,
            [
                _entry(path, there[path])
                for path in parse_qs(body.decode())["paths"]
                if path in there
            ],
        )

    def _xet_token(self, _: bytes, *, repo: str, revision: str) -> None:
        """Where hf_xet 1.8 stores chunks: a folder of this machine, which it writes to itself."""
        where = {
            "casUrl": f"local://{self.hub.folder / 'xet'}",
            "accessToken": "xet",
            "exp": 1 << 32,
        }
        headers = {
            "X-Xet-Cas-Url": where["casUrl"],
            "X-Xet-Access-Token": "xet",
            "X-Xet-Token-Expiration": f"{1 << 32}",
        }
        self._say(200, where, headers)

    def _branch(self, body: bytes, *, repo: str, branch: str) -> None:
        branches = self.hub.repos[repo].branches
        if self.command == "DELETE":
            del branches[branch]
        elif branch in branches:
            return self._say(409, {"error": "Reference already exists"})
        else:
            branches[branch] = json.loads(body)["startingPoint"]
        self._say(200, {})

    def _preupload(self, body: bytes, *, repo: str, revision: str) -> None:
        there = self.hub.repos[repo].at(revision)
        self._say(
            200,
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(_LARGE) else "regular",
                        "shouldIgnore": False,
                        "oid": (there[file["path"]].sha256 or there[file["path"]].oid)
                        if file["path"] in there
                        else None,
                    }
                    for file in json.loads(body)["files"]
                ]
            },
        )

    def _batch(self, body: bytes, *, repo: str) -> None:
        asked, verify = json.loads(body)["objects"], {"href": f"{self.hub.endpoint}/lfs-verify"}
        self._say(
            200,
            {
                "transfer": "basic",
                "objects": [
                    {"oid": file["oid"], "size": file["size"]}
                    | (
                        {}
                        if (self.hub.folder / file["oid"]).exists()
                        else {
                            "actions": {
                                "upload": self._upload_action(file["oid"], file["size"]),
                                "verify": verify,
                            }
                        }
                    )
                    for file in asked
                ],
            },
        )

    def _upload_action(self, oid: str, size: int) -> dict[str, Any]:
        # A presigned URL: its query is a secret of its own.
        href, secret = f"{self.hub.endpoint}/lfs/{oid}", "X-Amz-Signature=presigned"
        if size <= self.hub.part_bytes:
            return {"href": f"{href}?{secret}"}
        count = -(-size // self.hub.part_bytes)
        parts = {f"{number:05d}": f"{href}/{number}?{secret}" for number in range(1, count + 1)}
        return {
            "href": f"{href}/complete",
            "header": {"chunk_size": str(self.hub.part_bytes), **parts},
        }

    def _put(self, body: bytes, *, oid: str, part: str | None) -> None:
        if part is None:
            self.hub.store(body, large=True)
        else:
            (self.hub.folder / f"{oid}.{part}").write_bytes(body)
        self._say(200, {}, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def _complete(self, body: bytes, *, oid: str) -> None:
        parts = [
            self.hub.folder / f"{oid}.{part['partNumber']}" for part in json.loads(body)["parts"]
        ]
        self.hub.store(b"".join(part.read_bytes() for part in parts), large=True)
        self._say(200, {})

    def _verify(self, body: bytes) -> None:
        asked = json.loads(body)
        stored = self.hub.folder / asked["oid"]
        is_whole = stored.exists() and stored.stat().st_size == asked["size"]
        self._say(
            200 if is_whole else 422,
            {} if is_whole else {"error": "size or hash of the object is another"},
        )

    def _commit(self, body: bytes, *, repo: str, revision: str) -> None:
        found = self.hub.repos[repo]
        files = dict(found.at(revision))
        title = ""
        for line in body.splitlines():
            entry = json.loads(line)
            told = entry["value"]
            match entry["key"]:
                case "header":
                    title = told["summary"]
                    head = found.name(revision)
                    if told.get("parentCommit", head) != head:
                        return self._say(
                            412,
                            {"error": "A commit has happened since. Please refresh and try again."},
                        )
                case "file":
                    files[told["path"]] = self.hub.store(base64.b64decode(told["content"]))
                case "deletedFile":
                    del files[told["path"]]
                case "lfsFile":
                    content = self.hub.by_sha256(told["oid"]).read_bytes()
                    files[told["path"]] = self.hub.stored(
                        told["path"], self.hub.store(content, large=True)
                    )
                case other:
                    return self._say(400, {"error": f"{other} is never sent by keepmtp"})
        told = {"success": True, "commitUrl": f"{self.hub.endpoint}/{repo}"}
        if "create_pr=1" in self.query:
            number = sum(name.startswith("refs/pr/") for name in found.branches) + 1
            revision = f"refs/pr/{number}"
            found.titles[revision] = title
            told["pullRequestUrl"] = f"{told['commitUrl']}/discussions/{number}"
        self._say(200, told | {"commitOid": found.add(files, revision)})

    def _discussions(self, _: bytes, *, repo: str) -> None:
        """One on a page, as the Hub deals out many; closed ones are asked for by nobody."""
        titles = [*self.hub.repos[repo].titles.items()]
        page = int(self.query.rpartition("p=")[2])
        listed = []
        for branch, title in titles[page : page + 1]:
            one = {"num": int(branch.rpartition("/")[2]), "title": title, "status": "open"}
            one |= {"isPullRequest": True, "createdAt": "2026-01-01T00:00:00.000Z"}
            listed.append(one | {"repo": {"name": repo, "type": "model"}})
        self._say(200, {"count": len(titles), "start": page, "discussions": listed})

    def _settings(self, body: bytes, *, repo: str) -> None:
        self.hub.repos[repo].private = json.loads(body)["visibility"] == "private"
        self._say(200, {})

    def _resolve(self, _: bytes, *, repo: str, revision: str, file: str) -> None:
        found = self.hub.repos[repo]
        blob = found.at(revision).get(file)
        if blob is None:
            return self._say(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
        wanted = self.headers.get("Range")
        headers = {"ETag": f'"{blob.sha256 or blob.oid}"', "X-Repo-Commit": found.name(revision)}
        first, end = 0, blob.size - 1
        if wanted:
            start, _, last = wanted.removeprefix("bytes=").partition("-")
            first, end = int(start), min(int(last or end), end)
            headers["Content-Range"] = f"bytes {first}-{end}/{blob.size}"
        if self.command == "HEAD":
            return self._send(200, b"", headers | {"Content-Length": str(blob.size)})
        with open(blob.path or self.hub.folder / (blob.sha256 or blob.oid), "rb") as content:
            content.seek(first)
            body = content.read(end + 1 - first)
        self._send(206 if wanted else 200, body, headers)

    def _lead(self, _: bytes, *, repo: str, revision: str, file: str) -> None:
        """A large file is elsewhere, as on the Hub, if `leads_elsewhere`."""
        if self.hub.leads_elsewhere and file.endswith(_LARGE):
            self._send(
                302,
                b"",
                {
                    "Location": f"{self.hub.endpoint}/elsewhere/{repo}/{revision}/{file}?signed=secret"
                },
            )
        else:
            self._resolve(b"", repo=repo, revision=revision, file=file)

    def _say(self, status: int, told: object, headers: Mapping[str, str] | None = None) -> None:
        self._send(
            status,
            json.dumps(told).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        spoils = self.fault.spoils if self.fault else ""
        if self.fault and spoils == "rewrite":
            body = self.fault.rewrite(body)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        if spoils == "headers":
            self.flush_headers()
            self._drip(b"X-Slow: " + bytes(10_000))
        self.end_headers()
        if self.command == "HEAD":
            return
        if spoils == "truncate":
            self.wfile.write(body[: len(body) // 2])
            raise _Cut
        if spoils == "drip":
            self._drip(body)
        else:
            self.wfile.write(body)

    def _drip(self, content: bytes) -> None:
        for byte in content:
            self.wfile.write(bytes([byte or ord("x")]))
            time.sleep(DRIP_SECONDS)


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    """A file of a listing."""
    listed = {"type": "file", "path": path, "oid": blob.oid, "size": blob.size}
    return listed | (
        {"lfs": {"oid": blob.sha256, "size": blob.size, "pointerSize": 130}} if blob.sha256 else {}
    )


_WRITES = (
    _Handler._preupload,
    _Handler._batch,
    _Handler._commit,
    _Handler._settings,
    _Handler._branch,
)
_REPO, _AT = r"(?P<repo>(?:datasets/)?[^/]+/[^/]+)", r"(?P<revision>refs/pr/\d+|[^/]+)"
_ROUTES = (
    ("GET", r"/api/whoami-v2", _Handler._whoami),
    ("POST", r"/api/repos/create", _Handler._create),
    ("POST", r"/api/validate-yaml", _Handler._validate_yaml),
    ("GET", rf"/api/(?:models/)?{_REPO}(/revision/{_AT})?", _Handler._info),
    ("GET", rf"/api/(?:models/)?{_REPO}/tree/{_AT}(?P<below>/.*)?", _Handler._tree),
    ("POST", rf"/api/models/{_REPO}/preupload/{_AT}", _Handler._preupload),
    ("POST", rf"/api/models/{_REPO}/commit/{_AT}", _Handler._commit),
    ("GET", rf"/api/models/{_REPO}/discussions", _Handler._discussions),
    ("PUT", rf"/api/models/{_REPO}/settings", _Handler._settings),
    ("GET", rf"/api/models/{_REPO}/xet-write-token/{_AT}", _Handler._xet_token),
    ("POST", rf"/api/models/{_REPO}/paths-info/{_AT}", _Handler._paths_info),
    ("POST DELETE", rf"/api/models/{_REPO}/branch/(?P<branch>[^/]+)", _Handler._branch),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler._batch),
    ("PUT", r"/lfs/(?P<oid>\w{64})(/(?P<part>\d+))?", _Handler._put),
    ("POST", r"/lfs/(?P<oid>\w{64})/complete", _Handler._complete),
    ("POST", r"/lfs-verify", _Handler._verify),
    ("GET HEAD", rf"/{_REPO}/resolve/{_AT}/(?P<file>.+)", _Handler._lead),
    ("GET HEAD", rf"/elsewhere/{_REPO}/{_AT}/(?P<file>.+)", _Handler._resolve),
)
