"""Runs one program that a model wrote. `sandbox.py` starts this file in a process of its own; it is never imported.

In: a word and the program, on standard input. Out: the word on standard output, if the program ended as it should.

Easy to get wrong: the process is closed before a line of the program runs, for good, and from within: no file can be
written, no process started, no socket opened, no signal sent, no capability used. It needs no root and no container:
Landlock (Linux 5.13, landlock(7)) and a seccomp filter (seccomp(2)). What it can read it can tell nobody. A program
that ends the process itself never comes to the word.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

CPU_SECONDS = 3
MEMORY_BYTES = 4 << 30
OUTPUT_BYTES = 4096
CANNOT_CLOSE = 3
"""Exit status where this machine cannot close the process."""

# linux/landlock.h: write to, remove and make files; from ABI 2 move between folders, from ABI 3 truncate.
_WRITE = 1 << 1 | 0b1_1111_1111 << 4
_WRITE_SINCE = {2: 1 << 13, 3: 1 << 14}
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_CAPABILITIES = 0x20080522  # linux/capability.h, version 3

# Audit architecture, capset, then what a program is refused. Each line: processes; sockets; signals and other
# processes' memory; namespaces and kernel objects; rights and times of files, which Landlock leaves alone.
_X86 = (
    (56, 57, 58, 435, 59, 322),
    (41, 53, 425, 426, 427),
    (62, 200, 234, 129, 297, 424, 434, 101, 310, 311, 302),
    (272, 308, 165, 155, 321, 29, 64, 68, 240, 248, 250),
    (90, 91, 268, 452, 92, 93, 94, 260, 188, 189, 190, 197, 198, 199, 132, 235, 261, 280, 76),
)
_ARM = (
    (220, 435, 221, 281),
    (198, 199, 425, 426, 427),
    (129, 130, 131, 138, 240, 424, 434, 117, 270, 271, 261),
    (97, 268, 40, 41, 280, 194, 190, 186, 180, 217, 219),
    (52, 53, 452, 54, 55, 5, 6, 7, 14, 15, 16, 88, 45),
)
_MACHINES = {"x86_64": (0xC000003E, 126, _X86), "aarch64": (0xC00000B7, 91, _ARM)}
_X32 = 0x40000000  # x86_64's other table of calls begins here


def main() -> None:
    """Close the process, run the program, say the word."""
    word, program = sys.stdin.readline(), sys.stdin.read()
    out, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    try:
        _close()
    except OSError as error:
        sys.stderr.write(f"{error.strerror or error}")
        sys.stderr.flush()
        os._exit(CANNOT_CLOSE)
    for number in range(3):
        os.dup2(nothing, number)
    try:
        exec(compile(program, "answer", "exec"), {})  # noqa: S102 - this is what the file is for
    except BaseException:  # noqa: BLE001 - whatever it is, the program did not end as it should
        os._exit(1)
    os.write(out, word.encode())
    os._exit(0)


def _close() -> None:
    """Limits first, then what may be done at all."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (OUTPUT_BYTES, OUTPUT_BYTES))
    if platform.machine() not in _MACHINES:
        raise OSError(0, f"no filter for {platform.machine()}")
    architecture, capset, refused = _MACHINES[platform.machine()]
    libc = ctypes.CDLL(None, use_errno=True)
    _check("no_new_privs", libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _write_nothing(libc)
    _check("capset", libc.syscall(capset, struct.pack("Ii", _CAPABILITIES, 0), bytes(24)))
    _refuse_calls(libc, architecture, sorted({call for calls in refused for call in calls}))


def _write_nothing(libc: ctypes.CDLL) -> None:
    abi = _check("Landlock", libc.syscall(_CREATE_RULESET, None, 0, 1))
    handled = _WRITE | sum(bit for since, bit in _WRITE_SINCE.items() if abi >= since)
    ruleset = _check("Landlock", libc.syscall(_CREATE_RULESET, struct.pack("Q", handled), 8, 0))
    _check("Landlock", libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _refuse_calls(libc: ctypes.CDLL, architecture: int, calls: list[int]) -> None:
    """A seccomp filter: EPERM for these calls, the end for those of another architecture."""
    load, equal, above, give = 0x20, 0x15, 0x35, 0x06
    refuse, allow, kill = 0x00050001, 0x7FFF0000, 0x80000000
    num = len(calls)
    lines = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(above, num + 1, 0, _X32)]
    lines += [(equal, num - at, 0, call) for at, call in enumerate(calls)]
    lines += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    words = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(words))
    _check("seccomp", libc.prctl(_SET_SECCOMP, _FILTER, ctypes.c_char_p(program), 0, 0))


def _check(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


if __name__ == "__main__":
    main()
