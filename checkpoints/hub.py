"""What is asked of the Hub for a checkpoint: a repository's files, a small file, and headers by range requests.

In: a repository, a commit and a file's name. Out: the answer, or a refusal in one sentence. The header of a file on the
Hub is judged as that of a local file.

Easy to get wrong: a server may ignore the range and send the whole file. So no more is read than was asked for.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from httpx import HTTPError
from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from ..recipes.errors import KeepMTPError, NoCheckpointError
from .hub_client import HubError, install_once
from .safetensors_file import LENGTH_BYTES, FileHeader, header_length, parse_header

_FIRST_BYTES = 100_000  # of a shard; most headers are shorter, and then one request is enough
_TIMEOUT_SECONDS = 10


@contextmanager
def hub_errors(repo: str, revision: str) -> Iterator[None]:
    """Turns the Hub's exceptions, and those of its client over a mangled answer, into one sentence."""

    def refusal(error: Exception, rule: str, cure: str) -> NoCheckpointError:
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return NoCheckpointError(repo, rule, got=first_line.rstrip("."), cure=cure)

    install_once()
    try:
        yield
    except HubError as error:
        raise NoCheckpointError(error.where, error.rule, got=error.got, cure=error.cure) from error
    except KeepMTPError:
        raise
    except GatedRepoError as error:
        cure = "Ask for access on its page and run `hf auth login`"
        raise refusal(error, "the Hub repository must not be gated for you", cure) from error
    except RepositoryNotFoundError as error:
        cure = "Check the name, or run `hf auth login` if it is private"
        raise refusal(error, "must be a folder or a public Hub repository", cure) from error
    except RevisionNotFoundError as error:
        raise refusal(error, "the revision must exist", f"Check revision {revision}") from error
    except EntryNotFoundError as error:
        raise refusal(error, "a checkpoint has a config.json", "Check the repository") from error
    except OfflineModeIsEnabled as error:
        raise refusal(error, "the Hub must be reachable", "Unset HF_HUB_OFFLINE or give a folder") from error
    except (HfHubHTTPError, HTTPError, OSError) as error:
        raise refusal(error, "the Hub must be reachable", "Check the network, or give a folder as SOURCE") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        got = f"another answer ({type(error).__name__})"
        cure = "Run it again, or check HF_ENDPOINT"
        raise NoCheckpointError(repo, "the Hub must answer as it is documented", got=got, cure=cure) from error


def files_of(repo: str, revision: str) -> tuple[str, list[str]]:
    """The commit of a revision, and its files.

    Raises:
        NoCheckpointError: the Hub does not have it, or does not answer.
    """
    with hub_errors(repo, revision):
        info = HfApi().model_info(repo, revision=revision, timeout=_TIMEOUT_SECONDS)
        names = sorted(sibling.rfilename for sibling in info.siblings or ())
    if not all(isinstance(each, str) for each in (*names, info.sha or "")):
        raise NoCheckpointError(repo, "the Hub must list files by name", got="another answer", cure="Check HF_ENDPOINT")
    if strange := [name for name in names if name.startswith("/") or ".." in name.split("/")]:
        rule = "the Hub must list files of the repository"
        raise NoCheckpointError(repo, rule, got=repr(strange[0]), cure="Check HF_ENDPOINT")
    return info.sha or revision, names


def read_remote_header(repo: str, file: str, *, commit: str) -> FileHeader:
    """The header of one file, checked against the size that the Hub gives.

    Raises:
        CheckpointError: as `safetensors_file.read_header`.
        NoCheckpointError: the Hub does not send it.
    """
    where = f"{repo}/{file}"
    with hub_errors(repo, commit):
        url = hf_hub_url(repo, file, revision=commit)
        first, size = _start_of(url, _FIRST_BYTES, where)
        end = LENGTH_BYTES + header_length(first[:LENGTH_BYTES], size, where)
        if end > len(first):
            first, size = _start_of(url, end, where)
    return parse_header(first[LENGTH_BYTES:end], file=file, num_bytes=size, where=where)


def _start_of(url: str, num_bytes: int, where: str) -> tuple[bytes, int]:
    """The first `num_bytes` of a file, or all if it is shorter, and the size of the whole file."""
    headers = {**build_hf_headers(), "Range": f"bytes=0-{num_bytes - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as response:
        hf_raise_for_status(response)
        said = response.headers.get("Content-Range") or f"/{response.headers.get('Content-Length', '')}"
        size = re.search(r"/([0-9]{1,18})$", said)
        found = bytearray()
        for part in response.iter_bytes() if size else ():
            found += part
            if len(found) >= num_bytes:
                break
    if size is None or len(found) < min(num_bytes, int(size[1])):
        got = f"{len(found)} of {num_bytes} bytes" if size else "no size"
        raise NoCheckpointError(where, "the Hub must send a part of the file", got=got, cure="Run it again")
    return bytes(found[: min(num_bytes, int(size[1]))]), int(size[1])
