"""How much memory of this machine is free, for what would be kept in it.

In: nothing. Out: bytes that this process may still take without making the machine swap.

Easy to get wrong: a container has a limit of its own, which /proc/meminfo does not know; the
smaller number counts.

Source: Linux Documentation/filesystems/proc.rst (MemAvailable), admin-guide/cgroup-v2.rst
(memory.max, memory.current) and cgroup-v1/memory.rst.
"""

from pathlib import Path

# The limit and the use of the container this process is in: version 2, and version 1.
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_host_bytes(
    *, meminfo: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Free bytes of main memory, for all processes of this machine or container together.

    Args:
        meminfo: the kernel's account of the machine.
        groups: where the files of control groups are.
    """
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    for limit, used in _LIMITS:
        if (groups / limit).is_file() and (
            words := (groups / limit).read_text().strip()
        ).isdecimal():
            # A cache of files counts as used there, and is given back when memory is short: so this
            # is a lower bound.
            free = min(free, max(0, int(words) - int((groups / used).read_text())))
    return free
