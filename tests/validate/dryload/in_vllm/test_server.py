"""The process that loads: what keeps a weight that is really allocated from taking the machine's
memory.
"""

import subprocess
import sys

import pytest
from commands import captured

_ALLOCATE = """
import sys
from keepmtp.validate.dryload.in_vllm.server import limit_memory
limit_memory(256 << 20)
try:
    held = {allocation}
except (MemoryError, OSError, RuntimeError) as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""


def allocating(allocation: str) -> subprocess.CompletedProcess[str]:
    return captured(
        [sys.executable, "-c", _ALLOCATE.format(allocation=allocation)],
    )


@pytest.mark.parametrize(
    "allocation",
    [
        "bytearray(1 << 30)",
        "__import__('mmap').mmap(-1, 1 << 30, flags=2)",
        "__import__('numpy').empty(1 << 30, 'u1')",
    ],
)
def test_a_large_allocation_fails_before_it_is_filled(allocation):
    """Whoever allocates it: torch, NumPy, a mapping, Python itself."""
    done = allocating(allocation)
    assert done.returncode == 1 and ("Memory" in done.stderr or "memory" in done.stderr), (
        done.stderr
    )


def test_what_a_load_needs_is_given():
    """The twin: a small allocation under the same limit."""
    assert allocating("bytearray(64 << 20)").returncode == 0
