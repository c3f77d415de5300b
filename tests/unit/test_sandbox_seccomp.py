"""The filter is run here by an interpreter of classic BPF, so that its decisions are tested for both machines on either."""

from __future__ import annotations

import struct

import pytest

from mappa_graph.sandboxes.inside import seccomp

ALLOW, EPERM, ENOSYS, EAFNOSUPPORT = 0x7FFF0000, 0x50001, 0x50000 | 38, 0x50000 | 97
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
READ = {"x86_64": 0, "aarch64": 63}


def decide(machine: str, number: int, *args: int, arch: int | None = None) -> int:
    code = seccomp.program(machine)
    steps = [struct.unpack_from("HBBI", code, i) for i in range(0, len(code), 8)]
    arguments = (*args, *([0] * (6 - len(args))))
    data = struct.pack("<IIQ6Q", number, ARCH[machine] if arch is None else arch, 0, *arguments)
    accumulator, at = 0, 0
    while True:
        operation, yes, no, value = steps[at]
        at += 1
        if operation == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif operation == 0x15:
            at += yes if accumulator == value else no
        elif operation == 0x35:
            at += yes if accumulator >= value else no
        elif operation == 0x45:
            at += yes if accumulator & value else no
        else:
            assert operation == 0x06
            return value


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
class TestFilter:
    def numbers(self, machine: str) -> dict[str, int]:
        return {**(seccomp._X86_64 if machine == "x86_64" else seccomp._AARCH64), **seccomp._SHARED}

    def test_ordinary_calls_pass(self, machine: str) -> None:
        assert decide(machine, READ[machine]) == ALLOW

    def test_every_listed_call_is_refused(self, machine: str) -> None:
        for name, number in self.numbers(machine).items():
            if name not in ("clone", "clone3", "socket"):
                assert decide(machine, number) == EPERM, name

    def test_threads_and_forks_pass_but_new_namespaces_do_not(self, machine: str) -> None:
        clone = self.numbers(machine)["clone"]
        assert decide(machine, clone, 17) == ALLOW
        assert decide(machine, clone, 0x3D0F00) == ALLOW
        for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
            assert decide(machine, clone, flag | 17) == EPERM
        assert decide(machine, self.numbers(machine)["clone3"]) == ENOSYS

    def test_only_known_socket_families_pass(self, machine: str) -> None:
        socket = self.numbers(machine)["socket"]
        for family in (1, 2, 10):
            assert decide(machine, socket, family, 1, 0) == ALLOW
        assert decide(machine, socket, 16, 3, 0) == ALLOW
        for family, protocol in ((16, 9), (16, 16), (17, 0), (40, 0), (38, 0), (0, 0)):
            assert decide(machine, socket, family, 3, protocol) == EAFNOSUPPORT

    def test_calls_of_another_architecture_are_refused(self, machine: str) -> None:
        assert decide(machine, READ[machine], arch=0x40000003) == EPERM


def test_calls_of_the_x32_interface_are_refused() -> None:
    assert decide("x86_64", 0x40000000) == EPERM
