"""What a shared library for 64-bit x86 defines and imports, read from its ELF file."""

from __future__ import annotations

import dataclasses
import struct


@dataclasses.dataclass
class Library:
    #: Libraries that the loader loads with it.
    needed: list[str]
    #: Versions of symbols that it imports, such as "GLIBC_2.28".
    versions: set[str]
    #: Symbols that it exports, and those that it imports.
    defined: set[str]
    undefined: set[str]


class _File:
    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            self.data = file.read()
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        (start,) = struct.unpack_from("<Q", self.data, 40)
        size, count = struct.unpack_from("<HH", self.data, 58)
        # Of each section: type, place, size, and the section that it refers to.
        self.sections = []
        for number in range(count):
            fields = struct.unpack_from("<IIQQQQII", self.data, start + number * size)
            self.sections.append((fields[1], fields[4], fields[5], fields[6]))

    def of_kind(self, kind: int) -> list[tuple[int, int, int]]:
        """Returns place, size and the place of the strings of all sections of a kind."""
        found = [section for section in self.sections if section[0] == kind]
        return [(place, size, self.sections[link][1]) for _, place, size, link in found]

    def text(self, place: int) -> str:
        return self.data[place : self.data.index(b"\0", place)].decode()


_DYNAMIC, _SYMBOLS, _VERSIONS = 6, 11, 0x6FFFFFFE


def read(path: str) -> Library:
    """Reads a shared library. Raises ValueError if it is not one for this kind of machine."""
    file = _File(path)
    library = Library([], set(), set(), set())
    for place, size, strings in file.of_kind(_DYNAMIC):
        for tag, value in struct.iter_unpack("<QQ", file.data[place : place + size]):
            if tag == 1:
                library.needed.append(file.text(strings + value))
    for place, size, strings in file.of_kind(_SYMBOLS):
        for fields in struct.iter_unpack("<IBBHQQ", file.data[place : place + size]):
            name, section = file.text(strings + fields[0]), fields[3]
            if name:
                (library.defined if section else library.undefined).add(name)
    for place, _, strings in file.of_kind(_VERSIONS):
        while True:
            _, count, _, entry, after = struct.unpack_from("<HHIII", file.data, place)
            at = place + entry
            for _ in range(count):
                _, _, _, name, step = struct.unpack_from("<IHHII", file.data, at)
                library.versions.add(file.text(strings + name))
                at += step
            if after == 0:
                break
            place += after
    return library


def complaints(library: Library, glibc: tuple[int, int]) -> list[str]:
    """Returns why a library would not run on systems with that glibc, or not unwind into C++."""
    found = []
    for version in sorted(library.versions):
        name, _, number = version.partition("_")
        if name == "GLIBC" and tuple(map(int, number.split("."))) > glibc:
            found.append(f"it needs {version}")
    for name in sorted(library.defined):
        if name.startswith("_Unwind_"):
            found.append(f"it defines {name}")
    # An exception of PyTorch passes through the library's frames. That needs the unwinder that the
    # whole process uses, not a copy of one.
    if "_Unwind_Resume" not in library.undefined or "libgcc_s.so.1" not in library.needed:
        found.append("it does not use libgcc_s to unwind")
    return found
