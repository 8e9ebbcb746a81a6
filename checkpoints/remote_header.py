"""The header of a safetensors file on the Hub, by range requests: no weight is downloaded.

In: a repository, a commit and a file's name. Out: a `FileHeader`, judged as that of a local file.

Easy to get wrong: a server may ignore the range and send the whole file. So no more is read than was asked for.
"""

import re

from huggingface_hub import hf_hub_url
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from .safetensors_file import LENGTH_BYTES, FileHeader, header_length, parse_header

_FIRST_BYTES = 100_000  # of a shard; most headers are shorter, and then one request is enough
_TIMEOUT_SECONDS = 10


def read_remote_header(repo: str, file: str, *, commit: str) -> FileHeader:
    """The header of one file, checked against the size that the Hub gives.

    Raises:
        CheckpointError: as `safetensors_file.read_header`.
        SafetensorsParsingError: the Hub's answer is no part of a file.
        HfHubHTTPError, HTTPError: the Hub does not answer, or not with the file.
    """
    where = f"{repo}/{file}"
    url = hf_hub_url(repo, file, revision=commit)
    first, size = _start_of(url, _FIRST_BYTES)
    end = LENGTH_BYTES + header_length(first[:LENGTH_BYTES], size, where)
    if end > len(first):
        first, size = _start_of(url, end)
    return parse_header(first[LENGTH_BYTES:end], file=file, num_bytes=size, where=where)


def _start_of(url: str, num_bytes: int) -> tuple[bytes, int]:
    """The first `num_bytes` of a file, or all if it is shorter, and the size of the whole file."""
    headers = {**build_hf_headers(), "Range": f"bytes=0-{num_bytes - 1}", "Accept-Encoding": "identity"}
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as response:
        hf_raise_for_status(response)
        said = response.headers.get("Content-Range", "") or f"/{response.headers.get('Content-Length', '')}"
        size = re.search(r"/([0-9]{1,18})$", said)
        if size is None:
            raise SafetensorsParsingError(f"no size of {url} in the Hub's answer")
        found = bytearray()
        for part in response.iter_bytes():
            found += part
            if len(found) >= num_bytes:
                break
    wanted = min(num_bytes, int(size[1]))
    if len(found) < wanted:
        raise SafetensorsParsingError(f"{len(found)} bytes of {url} where {wanted} were asked for")
    return bytes(found[:wanted]), int(size[1])
