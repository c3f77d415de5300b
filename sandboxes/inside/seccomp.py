"""A system-call filter in classic BPF: what data science never needs and kernel exploits like to begin with.

It is the last layer, not the first: a kernel process has no capabilities and no way to get any, so most of these calls would be refused
anyway. The filter keeps the code behind them out of reach. Denied calls fail with EPERM, except `clone3`, which says ENOSYS so that the C
library falls back to `clone`, whose flags a filter can see. Sockets are limited to unix, IPv4, IPv6 and route netlink (vsock, for one,
isn't bound by network namespaces). On machines other than x86_64 and aarch64 there is no filter, and `supported()` says so.
"""

from __future__ import annotations

import ctypes
import platform
import struct

_ALLOW, _ERRNO, _EPERM, _ENOSYS, _EAFNOSUPPORT = 0x7FFF0000, 0x00050000, 1, 38, 97
_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARG0, _ARG2 = 0, 4, 16, 32
_NAMESPACES = 0x7E020080
"""Every CLONE_NEW* flag that `clone` knows: time, mount, cgroup, uts, ipc, user, pid, net."""

_X86_64 = {
    "socket": 41, "clone": 56, "clone3": 435, "ptrace": 101, "syslog": 103, "uselib": 134, "ustat": 136, "vhangup": 153,
    "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167,
    "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175,
    "delete_module": 176, "quotactl": 179, "lookup_dcookie": 212, "clock_settime": 227, "kexec_load": 246, "add_key": 248,
    "request_key": 249, "keyctl": 250, "migrate_pages": 256, "unshare": 272, "move_pages": 279, "perf_event_open": 298,
    "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
    "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "kexec_file_load": 320, "bpf": 321,
    "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "socket": 198, "clone": 220, "clone3": 435, "ptrace": 117, "syslog": 116, "vhangup": 58, "pivot_root": 41, "adjtimex": 171,
    "chroot": 51, "acct": 89, "settimeofday": 170, "mount": 40, "umount2": 39, "swapon": 224, "swapoff": 225, "reboot": 142,
    "sethostname": 161, "setdomainname": 162, "init_module": 105, "delete_module": 106, "quotactl": 60, "lookup_dcookie": 18,
    "clock_settime": 112, "kexec_load": 104, "add_key": 217, "request_key": 218, "keyctl": 219, "migrate_pages": 238, "unshare": 97,
    "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
    "kexec_file_load": 294, "bpf": 280, "userfaultfd": 282,
}  # fmt: skip
_SHARED = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
    "quotactl_fd": 443,
}  # fmt: skip
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
_NETLINK, _NETLINK_ROUTE = 16, 0


def supported() -> bool:
    """Whether there is a filter for this machine."""
    return platform.machine() in ("x86_64", "aarch64")


def program(machine: str) -> bytes:
    """The filter for `machine` ("x86_64" or "aarch64") as an array of `struct sock_filter`."""
    numbers, audit = (_X86_64, 0xC000003E) if machine == "x86_64" else (_AARCH64, 0xC00000B7)
    denied = sorted({n for name, n in {**numbers, **_SHARED}.items() if name not in ("socket", "clone", "clone3")})
    out: list[tuple[int, int, int, int]] = []

    def refuse(errno: int) -> tuple[int, int, int, int]:
        return (_RET, 0, 0, _ERRNO | errno)

    out += [(_LD, 0, 0, _ARCH), (_JEQ, 1, 0, audit), refuse(_EPERM), (_LD, 0, 0, _NR)]
    if machine == "x86_64":
        out += [(_JGE, 0, 1, 0x40000000), refuse(_EPERM)]  # the x32 ABI numbers its calls from here
    for number in denied:
        out += [(_JEQ, 0, 1, number), refuse(_EPERM)]
    out += [(_JEQ, 0, 1, numbers["clone3"]), refuse(_ENOSYS)]
    out += [(_JEQ, 0, 4, numbers["clone"]), (_LD, 0, 0, _ARG0), (_JSET, 0, 1, _NAMESPACES), refuse(_EPERM), (_RET, 0, 0, _ALLOW)]
    out += [(_JEQ, 0, 5 + len(_FAMILIES), numbers["socket"]), (_LD, 0, 0, _ARG0)]
    out += [(_JEQ, len(_FAMILIES) - i + 3, 0, family) for i, family in enumerate(_FAMILIES)]
    out += [(_JEQ, 0, 2, _NETLINK), (_LD, 0, 0, _ARG2), (_JEQ, 1, 0, _NETLINK_ROUTE)]
    out += [refuse(_EAFNOSUPPORT), (_RET, 0, 0, _ALLOW)]
    return b"".join(struct.pack("HBBI", *step) for step in out)


def install(libc: ctypes.CDLL) -> None:
    """Put the filter on this thread and all that it will start. `no_new_privs` must be set. Raises OSError."""
    code = program(platform.machine())
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer)))
    if libc.prctl(22, 2, header, 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        error = ctypes.get_errno()
        raise OSError(error, "seccomp filter refused")
