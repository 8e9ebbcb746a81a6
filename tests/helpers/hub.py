"""A Hub on loopback: repositories of models can be made, written to and read, datasets read, with
faults on request.

It speaks what huggingface_hub 1.33 and `datasets` ask with HF_HUB_DISABLE_XET=1: LFS in one piece,
commits, branches, settings, trees, byte ranges. With Xet it gives hf_xet a folder of
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
"""Between two drops of an answer."""
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
        spoils: the right answer is sent, but otherwise: "drip" a `drop` at a time, "headers" that
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
    drop: int = 1

    def is_cut(self) -> bool:
        """The connection ends without an answer."""
        return not self.status and not self.spoils and self.before is None


_NONE = Fault("", before=bool)


@dataclass
class Blob:
    """A file of a commit, whose bytes are at `path`: git's hash, and the SHA-256 of a large one."""

    oid: str
    size: int
    path: Path
    sha256: str = ""


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
        faults: taken in order.
        requests: "METHOD /path" of each, and the range where one was asked for.
        authorizations: what it was sent to know who asks.
        put: bytes that arrived by PUT, by the last part of the path: a large file's SHA-256.
        leads_elsewhere: a large file is asked for at another address, which the Hub answers with.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repos: dict[str, Repo] = {}
        self.writers = ["me", "org"]
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.authorizations: list[str] = []
        self.put: Counter[str] = Counter()
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
        blobs = {}
        for path in sorted(folder.iterdir()):
            if path.is_file():
                oid = hashlib.sha1(path.name.encode()).hexdigest()
                blobs[path.name] = Blob(oid=oid, size=path.stat().st_size, path=path)
        return repo.add(blobs)

    def commit(self, name: str, files: Mapping[str, bytes]) -> str:
        """Somebody's commit of small files."""
        repo = self.repos[name]
        before = repo.at("main") if repo.commits else {}
        return repo.add(before | {path: self.store(content) for path, content in files.items()})

    def store(self, content: bytes, *, large: bool = False) -> Blob:
        """Keep bytes under their hash."""
        sha256 = hashlib.sha256(content).hexdigest()
        blob = Blob(oid="", size=len(content), path=self.folder / sha256)
        git = content
        if large:
            blob.sha256 = sha256
            words = "version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n"
            git = (words % (sha256, blob.size)).encode()
        blob.oid = hashlib.sha1(b"blob %d\0%b" % (len(git), git)).hexdigest()
        blob.path.write_bytes(content)
        return blob

    def files(self, name: str) -> dict[str, bytes]:
        """What a repository holds now."""
        there = self.repos[name].at("main")
        return {path: blob.path.read_bytes() for path, blob in there.items()}


def other_hash(name: str) -> dict[str, Any]:
    """For a `Fault` of a listing: the Hub says that it has stored other bytes of one file."""

    def rewrite(body: bytes) -> bytes:
        told = json.loads(body)
        for entry in told["siblings"]:
            if entry["rfilename"] == name:
                entry["blobId"] = "0" * 40
                if "lfs" in entry:
                    entry["lfs"]["sha256"] = "0" * 64
        return json.dumps(told).encode()

    return {"times": 9, "spoils": "rewrite", "rewrite": rewrite}


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """A Hub whose `endpoint` is for HF_ENDPOINT."""
    folder.mkdir(exist_ok=True)
    hub = Hub(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub=hub))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    # Its end waits for the next look at whether it is to end.
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
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
        self.fault = _NONE
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
            if fault.before:
                fault.before()
            if fault.hold:
                fault.hold.wait(60)
            if fault.status:
                # a server may say what it was told
                echo = f"sent with {self.headers.get('Authorization')}"
                said = json.dumps({"error": echo}).encode()
                if fault.body is not None:
                    said = fault.body
                headers = {"Content-Type": "application/json", "X-HF-Warning": f"echo; {echo}"}
                return self._send(fault.status, said, headers | dict(fault.headers))
            self._answer(body)
        except (_Cut, ConnectionError):
            self.close_connection = True

    def _fault(self, line: str) -> Fault:
        for fault in self.hub.faults:
            if fault.times and re.search(fault.to, line):
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return _NONE

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _body(self, fault: Fault) -> bytes:
        left = int(self.headers.get("Content-Length", 0))
        cut = fault.is_cut()
        body = b""
        while left and (chunk := self.rfile.read(min(left, 1 << 16))):
            body += chunk
            left -= len(chunk)
            if self.command == "PUT":
                self.hub.put[self.path.rpartition("/")[2]] += len(chunk)
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
            return self._refuse(401, "Invalid credentials in Authorization header")
        for method, pattern, answer in _ROUTES:
            if self.command in method and (found := re.fullmatch(pattern, self.path)):
                told = found.groupdict()
                if "repo" in told:
                    repo = self.hub.repos.get(told["repo"])
                    if repo is None or (repo.private and not token):
                        return self._refuse(404, "Repository not found", "RepoNotFound")
                    if "revision" in told and not repo.name(told["revision"] or "main"):
                        return self._refuse(404, "Invalid rev id", "RevisionNotFound")
                    owner = told["repo"].split("/")[0]
                    may_write = token == TOKEN and owner in self.hub.writers
                    if answer in _WRITES and not may_write:
                        return self._refuse(403, "You have no write access")
                return answer(self, body, **told)
        self._refuse(404, f"no route for {self.command} {self.path}", "EntryNotFound")

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _whoami(self, _: bytes) -> None:
        role = "read" if self._token() == READ_ONLY else "write"
        if not self._token():
            return self._refuse(401, "Unauthorized")
        auth = {"type": "access_token", "accessToken": {"displayName": "t", "role": role}}
        self._say(200, {"type": "user", "name": "me", "orgs": [{"name": "org"}], "auth": auth})

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] not in self.hub.writers:
            return self._refuse(403, f"You may not create a model under {asked['organization']}")
        if name in self.hub.repos:
            return self._refuse(409, "You already created this model repo")
        self.hub.add(name, private=asked.get("visibility") == "private")
        self._say(200, {"url": f"{self.hub.endpoint}/{name}", "name": name, "id": name})

    def _validate_yaml(self, _: bytes) -> None:
        self._say(200, {"errors": [], "warnings": []})

    def _info(self, _: bytes, *, repo: str, revision: str | None) -> None:
        found = self.hub.repos[repo]
        commit = found.name(revision or "main")
        files = []
        for path, blob in found.at(commit).items():
            file: dict[str, Any] = {"rfilename": path, "size": blob.size, "blobId": blob.oid}
            if blob.sha256:
                file["lfs"] = {"sha256": blob.sha256, "size": blob.size, "pointerSize": 130}
            files.append(file)
        told = {"id": repo, "sha": commit, "siblings": files, "private": found.private}
        self._say(200, told | {"tags": [], "downloads": 0, "likes": 0})

    def _tree(self, _: bytes, *, repo: str, revision: str, below: str | None) -> None:
        start = f"{(below or '').strip('/')}/".lstrip("/")
        listed = {}
        for path, blob in self.hub.repos[repo].at(revision).items():
            inner, slash, _ = path.removeprefix(start).partition("/")
            if slash and "recursive=true" not in self.query.lower():
                folder = {"type": "directory", "path": start + inner, "oid": "0" * 40, "size": 0}
                listed[start + inner] = folder
            else:
                listed[path] = _entry(path, blob)
        self._say(200, [entry for path, entry in listed.items() if path.startswith(start)])

    def _paths_info(self, body: bytes, *, repo: str, revision: str) -> None:
        there = self.hub.repos[repo].at(revision)
        paths = parse_qs(body.decode())["paths"]
        self._say(200, [_entry(path, there[path]) for path in paths if path in there])

    def _xet_token(self, _: bytes, *, repo: str, revision: str) -> None:
        """Where hf_xet 1.8 stores chunks: a folder of this machine, which it writes to itself."""
        place = f"local://{self.hub.folder / 'xet'}"
        headers = {
            "X-Xet-Cas-Url": place,
            "X-Xet-Access-Token": "xet",
            "X-Xet-Token-Expiration": f"{1 << 32}",
        }
        self._say(200, {"casUrl": place, "accessToken": "xet", "exp": 1 << 32}, headers)

    def _preupload(self, body: bytes, *, repo: str, revision: str) -> None:
        there = self.hub.repos[repo].at(revision)
        files = []
        for asked in json.loads(body)["files"]:
            path = asked["path"]
            file = {"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": None}
            if path.endswith(_LARGE):
                file["uploadMode"] = "lfs"
            if path in there:
                file["oid"] = there[path].sha256 or there[path].oid
            files.append(file)
        self._say(200, {"files": files})

    def _batch(self, body: bytes, *, repo: str) -> None:
        objects = []
        for asked in json.loads(body)["objects"]:
            file = {"oid": asked["oid"], "size": asked["size"]}
            if not (self.hub.folder / asked["oid"]).exists():
                # A presigned URL: its query is a secret of its own.
                href = f"{self.hub.endpoint}/lfs/{asked['oid']}?X-Amz-Signature=presigned"
                verify = f"{self.hub.endpoint}/lfs-verify"
                file["actions"] = {"upload": {"href": href}, "verify": {"href": verify}}
            objects.append(file)
        self._say(200, {"transfer": "basic", "objects": objects})

    def _put(self, body: bytes, *, oid: str) -> None:
        self.hub.store(body, large=True)
        self._say(200, {})

    def _verify(self, body: bytes) -> None:
        asked = json.loads(body)
        stored = self.hub.folder / asked["oid"]
        if stored.exists() and stored.stat().st_size == asked["size"]:
            return self._say(200, {})
        self._refuse(422, "size or hash of the object is another")

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
                        return self._refuse(412, "A commit has happened since. Please refresh.")
                case "file":
                    files[told["path"]] = self.hub.store(base64.b64decode(told["content"]))
                case "deletedFile":
                    del files[told["path"]]
                case "lfsFile":
                    content = (self.hub.folder / told["oid"]).read_bytes()
                    files[told["path"]] = self.hub.store(content, large=True)
                case other:
                    return self._refuse(400, f"{other} is never sent by keepmtp")
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
            return self._refuse(404, "Entry not found", "EntryNotFound")
        wanted = self.headers.get("Range")
        headers = {"ETag": f'"{blob.sha256 or blob.oid}"', "X-Repo-Commit": found.name(revision)}
        first, end = 0, blob.size - 1
        if wanted:
            start, _, last = wanted.removeprefix("bytes=").partition("-")
            first, end = int(start), min(int(last or end), end)
            headers["Content-Range"] = f"bytes {first}-{end}/{blob.size}"
        if self.command == "HEAD":
            return self._send(200, b"", headers | {"Content-Length": str(blob.size)})
        with open(blob.path, "rb") as content:
            content.seek(first)
            body = content.read(end + 1 - first)
        self._send(206 if wanted else 200, body, headers)

    def _lead(self, _: bytes, *, repo: str, revision: str, file: str) -> None:
        """A large file is elsewhere, as on the Hub, if `leads_elsewhere`."""
        if self.hub.leads_elsewhere and file.endswith(_LARGE):
            place = f"{self.hub.endpoint}/elsewhere/{repo}/{revision}/{file}?signed=secret"
            self._send(302, b"", {"Location": place})
        else:
            self._resolve(b"", repo=repo, revision=revision, file=file)

    def _refuse(self, status: int, words: str, code: str = "") -> None:
        self._say(status, {"error": words}, {"X-Error-Code": code, "X-Error-Message": words})

    def _say(self, status: int, told: object, headers: Mapping[str, str] | None = None) -> None:
        is_json = {"Content-Type": "application/json"}
        self._send(status, json.dumps(told).encode(), is_json | {**(headers or {})})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        spoils = self.fault.spoils
        if spoils == "rewrite":
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
        drop = self.fault.drop
        for start in range(0, len(content), drop):
            self.wfile.write(content[start : start + drop].replace(b"\0", b"x"))
            time.sleep(DRIP_SECONDS)


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    """A file of a listing."""
    entry: dict[str, Any] = {"type": "file", "path": path, "oid": blob.oid, "size": blob.size}
    if blob.sha256:
        entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": 130}
    return entry


_WRITES = (
    _Handler._preupload,
    _Handler._batch,
    _Handler._commit,
    _Handler._settings,
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
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler._batch),
    ("PUT", r"/lfs/(?P<oid>\w{64})", _Handler._put),
    ("POST", r"/lfs-verify", _Handler._verify),
    ("GET HEAD", rf"/{_REPO}/resolve/{_AT}/(?P<file>.+)", _Handler._lead),
    ("GET HEAD", rf"/elsewhere/{_REPO}/{_AT}/(?P<file>.+)", _Handler._resolve),
)
