"""Element types: their names, sizes, and codes in DLPack and in the CUDA array interface."""

from __future__ import annotations

from typing import NamedTuple


class DType(NamedTuple):
    """An element type."""

    name: str
    #: DLPack's type code: 0 int, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool.
    code: int
    bits: int
    #: The type in an array interface; raw bytes for types that it has no name for.
    typestr: str

    @property
    def itemsize(self) -> int:
        return -(-self.bits // 8)


def _make() -> dict[str, DType]:
    found = {}
    for bits in (8, 16, 32, 64):
        size, order = bits // 8, "|" if bits == 8 else "<"
        found[f"int{bits}"] = DType(f"int{bits}", 0, bits, f"{order}i{size}")
        found[f"uint{bits}"] = DType(f"uint{bits}", 1, bits, f"{order}u{size}")
    for bits in (16, 32, 64):
        found[f"float{bits}"] = DType(f"float{bits}", 2, bits, f"<f{bits // 8}")
    found["bfloat16"] = DType("bfloat16", 4, 16, "<V2")
    for bits in (64, 128):
        found[f"complex{bits}"] = DType(f"complex{bits}", 5, bits, f"<c{bits // 8}")
    found["bool"] = DType("bool", 6, 8, "|b1")
    return found


_BY_NAME = _make()

# The names of types in manifests, which are those of safetensors files.
_IN_FILES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_FROM_FILES = {name: ours for ours, name in _IN_FILES.items()}
_BY_CODE = {(dtype.code, dtype.bits): dtype for dtype in _BY_NAME.values()}


def dtype_of(named: object) -> DType:
    """Returns an element type by its name, or by a dtype of NumPy, CuPy or PyTorch.

    >>> dtype_of("float16").itemsize
    2
    """
    if getattr(named, "isnative", True) is False:
        raise ValueError(f"{named!r} has bytes in another order than the device")
    if named is float:
        raise ValueError("Python's float has 64 bits, and names of types here say so: 'float64'")
    name = getattr(named, "name", None) or getattr(named, "__name__", None) or str(named)
    name = name.rpartition(".")[2]
    name = {"bool_": "bool", "float": "float32", "half": "float16"}.get(name, name)
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueError(f"{named!r} is none of {', '.join(_BY_NAME)}") from None


def dtype_of_code(code: int, bits: int, lanes: int = 1) -> DType:
    """Returns an element type by its codes in DLPack. One of several numbers has no other name."""
    found = _BY_CODE.get((code, bits)) if lanes == 1 else None
    name = f"dlpack:{code}:{bits}" if lanes == 1 else f"dlpack:{code}:{bits}x{lanes}"
    bits *= lanes
    return found or DType(name, code, bits, f"|V{-(-bits // 8)}")


def name_in_files(name: str) -> str:
    """Returns the name of a type in a manifest. One that files have no name for keeps its own.

    >>> name_in_files("bfloat16"), name_in_files("complex128")
    ('BF16', 'complex128')
    """
    return _IN_FILES.get(name, name)


def name_from_files(name: str) -> str:
    """Returns the name that NumPy and PyTorch have for a type of a manifest.

    >>> name_from_files("F8_E4M3"), name_from_files("complex128")
    ('float8_e4m3fn', 'complex128')
    """
    return _FROM_FILES.get(name, name)
