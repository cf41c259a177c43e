"""Sizes as numbers of bytes and as text."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_NAMES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def bytes_of(size: int | str) -> int:
    """Returns a size in bytes.

    >>> bytes_of("60GiB") == 60 << 30
    True
    >>> bytes_of("1.5 GiB") == 3 << 29
    True
    >>> bytes_of(4096)
    4096

    Raises ValueError for a size that is not at least one byte, or more than any memory has, and TypeError
    for other types.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"a size is an int or text such as '60GiB', not {size!r}")
    if isinstance(size, int):
        found = size
    else:
        match = _TEXT.fullmatch(size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{size!r} is not a size such as '512MiB' or '60GiB'")
        found = int(match[1]) * unit if "." not in match[1] else int(float(match[1]) * unit)
    if found < 1:
        raise ValueError(f"a size is at least one byte, not {size!r}")
    if found >= 1 << 63:
        raise ValueError(f"no memory has the size {size!r}")
    return found


def text_of(size: int) -> str:
    """Returns a size as text for people, in the form that the library's errors have: exact if two
    decimals or five digits of a smaller unit are enough, rounded to two decimals otherwise.

    >>> text_of(3 << 29)
    '1.5 GiB'
    >>> text_of(1538 << 20)
    '1538 MiB'
    >>> text_of(512)
    '512 B'
    """
    largest = min(max(size.bit_length() - 1, 0) // 10, len(_NAMES) - 1)
    unit = 1 << (10 * largest)
    text = f"{size / unit:.2f}"
    if size * 100 % unit == 0:
        return f"{text.rstrip('0').rstrip('.')} {_NAMES[largest]}"
    # A smaller unit that divides it, with few digits.
    for power in range(largest - 1, -1, -1):
        number, rest = divmod(size, 1 << (10 * power))
        if rest == 0 and number < 100_000:
            return f"{number} {_NAMES[power]}"
    return f"{text} {_NAMES[largest]}"
