"""Element types: their names, sizes, and codes in DLPack and in the CUDA array interface.

Two numbers of 4 bits share a byte, the first one in the lower bits. Here this byte is the element, of type
`float4_e2m1fn_x2` as in PyTorch, so that shapes and strides count bytes and an address is an element's. Other
formats count the numbers: safetensors' `F4`, and DLPack's tensors of one lane. Their last dimension is twice as
long, and must be even, so that each row begins with a byte. `pairs_of` and `shape_in_files` convert.
"""

from __future__ import annotations

from typing import NamedTuple


class DType(NamedTuple):
    """An element type."""

    name: str
    #: DLPack's type code: 0 int, 1 unsigned, 2 float, 4 bfloat, 5 complex, 6 bool, from 7 on see `_NARROW`.
    code: int
    #: The bits of a number.
    bits: int
    #: The type in an array interface; raw bytes for types that it has no name for.
    typestr: str
    #: The numbers in an element.
    lanes: int = 1

    @property
    def itemsize(self) -> int:
        return -(-self.bits * self.lanes // 8)

    def is_type_of(self, source: object, typestr: object) -> bool:
        """Returns True if the elements of an array in host memory are of this type.

        Several types have the same `typestr` of raw bytes. NumPy's arrays of such a type name it.
        """
        name = getattr(getattr(source, "dtype", None), "name", None)
        if self.typestr[1] == "V" and isinstance(name, str):
            return name == self.name
        return typestr == self.typestr


# DLPack's types of less than 16 bits, from its version 1.1 on: names by code, and the bits of each.
_NARROW = {
    7: ("float8_e3m4", 8),
    8: ("float8_e4m3", 8),
    9: ("float8_e4m3b11fnuz", 8),
    10: ("float8_e4m3fn", 8),
    11: ("float8_e4m3fnuz", 8),
    12: ("float8_e5m2", 8),
    13: ("float8_e5m2fnuz", 8),
    14: ("float8_e8m0fnu", 8),
    15: ("float6_e2m3fn", 6),
    16: ("float6_e3m2fn", 6),
    17: ("float4_e2m1fn", 4),
}
#: A number of 4 bits, and the byte of two.
_FP4, FP4_PAIR = _NARROW[17][0], "float4_e2m1fn_x2"


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
    for code, (name, bits) in _NARROW.items():
        if bits == 8:
            found[name] = DType(name, code, bits, "<V1")
    found[FP4_PAIR] = DType(FP4_PAIR, 17, 4, "<V1", 2)
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
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    FP4_PAIR: "F4",
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
_BY_CODE = {(dtype.code, dtype.bits, dtype.lanes): dtype for dtype in _BY_NAME.values()}


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
    if name == _FP4:
        raise ValueError(f"{named!r} takes a byte for each number, and device memory for two: name {FP4_PAIR!r}")
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueError(f"{named!r} is none of {', '.join(_BY_NAME)}") from None


def dtype_of_code(code: int, bits: int, lanes: int = 1) -> DType:
    """Returns an element type by its codes in DLPack. One that has no other name here is named by its codes.

    Raises BufferError for an element without bits, and for one that has not the bits of its code.
    """
    name, expected = _NARROW.get(code, ("", bits))
    if bits == 0 or lanes == 0:
        raise BufferError(f"a tensor's elements of {lanes} times {bits} bits have no size")
    if bits != expected:
        raise BufferError(f"a tensor's elements of type {name} have {expected} bits, not {bits}")
    found = _BY_CODE.get((code, bits, lanes))
    name = f"dlpack:{code}:{bits}" if lanes == 1 else f"dlpack:{code}:{bits}x{lanes}"
    return found or DType(name, code, bits, f"|V{-(-bits * lanes // 8)}", lanes)


def pairs_of(
    dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...]
) -> tuple[DType, tuple[int, ...], tuple[int, ...]]:
    """Returns a tensor whose shape and strides count numbers of 4 bits as one that counts bytes; any other as it is.

    >>> pairs_of(dtype_of_code(17, 4), (3, 8), (8, 1))[1:]
    ((3, 4), (4, 1))

    Raises ValueError if a row begins or ends within a byte, or has gaps.
    """
    if (dtype.code, dtype.lanes) != (17, 1):
        return dtype, shape, strides
    pairs = shape_from_files("F4", shape)
    steps = [step for size, step in zip(shape[:-1], strides, strict=False) if size > 1]
    if 0 not in shape and (any(step % 2 for step in steps) or strides[-1:] != (1,)):
        raise ValueError(f"rows of {_FP4} begin within a byte, or have gaps: strides {strides}, in numbers")
    return _BY_NAME[FP4_PAIR], pairs, (*(step // 2 for step in strides[:-1]), 1)


def shape_in_files(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape in a manifest of a tensor whose type has this name there.

    >>> shape_in_files("F4", (3, 4)), shape_in_files("BF16", (3, 4))
    ((3, 8), (3, 4))

    Raises ValueError for two numbers of 4 bits without a dimension.
    """
    if name != "F4":
        return shape
    if not shape:
        raise ValueError(f"{FP4_PAIR} without dimensions has no shape that counts its two numbers")
    return (*shape[:-1], 2 * shape[-1])


def shape_from_files(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape here of a tensor of a manifest: in bytes for `F4`.

    >>> shape_from_files("F4", (3, 8)), shape_from_files("BF16", (3, 8))
    ((3, 4), (3, 8))

    Raises ValueError for `F4` if the last dimension is odd, or missing.
    """
    if name != "F4":
        return shape
    if not shape or shape[-1] % 2:
        raise ValueError(f"numbers of 4 bits lie two to a byte: the last dimension of {shape} is not even")
    return (*shape[:-1], shape[-1] // 2)


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
