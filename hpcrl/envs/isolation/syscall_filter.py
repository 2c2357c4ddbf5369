"""The filter that denies a process memory which no watcher could see: memfd_create, memfd_secret, shmget.

    deny_hidden_memory  deny them to this process and all that it starts, forever
    build_filter        the program of the filter, as the kernel reads it
    DENIED_CALLS        the numbers of the denied system calls, by audit architecture
    KNOWN_MACHINES      the machines whose calls these are

Such memory needs no process that maps it: it may wait in a descriptor, on its way through a socket, or under a key. To
programs the kernel seems to lack these calls (ENOSYS), so they use a file in /tmp or /dev/shm, which counts as disk.
"""

import ctypes
import errno
import os
import struct

DENIED_CALLS = {
    0xC000003E: (319, 447, 29),  # x86-64, and x32
    0x40000003: (356, 447, 395, 117),  # 32-bit x86; 117 is ipc, which contains shmget
    0xC00000B7: (279, 447, 194),  # 64-bit ARM
    0x40000028: (385, 447, 307, 117),  # 32-bit ARM
}
KNOWN_MACHINES = ("x86_64", "aarch64", "arm64")
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_X32_BIT = 0x40000000
_LOAD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _FilterProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def build_filter() -> bytes:
    """Build the filter; a call of an architecture that is not known here is allowed."""
    code = [(_LOAD, 0, 0, 4)]  # the architecture
    for architecture, numbers in DENIED_CALLS.items():
        code.append((_JUMP_IF_EQUAL, 0, len(numbers) + 4, architecture))
        code.append((_LOAD, 0, 0, 0))  # the number of the call
        code.append((_AND, 0, 0, ~_X32_BIT & 0xFFFFFFFF))
        code += [(_JUMP_IF_EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
        code.append((_RETURN, 0, 0, _ALLOW))
        code.append((_RETURN, 0, 0, _ERRNO | errno.ENOSYS))
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def deny_hidden_memory() -> None:
    """Deny these calls to this process and all that it starts; nothing happens on a machine that is not known here."""
    if os.uname().machine not in KNOWN_MACHINES:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    code = build_filter()
    program = _FilterProgram(len(code) // struct.calcsize("HBBI"), code)
    if (
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
        or libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0
    ):
        raise OSError(ctypes.get_errno(), "prctl failed")
