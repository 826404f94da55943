"""GGUF files: the header read by hand, the tensors as views of the mapped file. Torch-free.

Nothing the header says is believed before it is checked against the size of the file: a corrupt or
truncated file is a `ModelError`, never a crash or an allocation of terabytes.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...protocol.errors import ModelError

_MAGIC = b"GGUF"
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MAX_NESTING = 4
_MAX_DIMS = 4

# ggml's number of a tensor type: name, values a block, bytes a block.
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. ``shape`` is in torch's order (rows first)."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    nbytes: int


class GGUFFile:
    """A parsed file: ``metadata`` (number arrays as numpy, string arrays as lists), ``tensors``.

    Raises `ModelError` for anything that is not a whole, valid GGUF of version 2 or 3.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # A private, writable mapping: torch wants writable memory, the file stays as it is.
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}") from None
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            _parse(_Reader(self.buffer), self.metadata, self.tensors)
        except _MalformedError as error:
            raise ModelError(f"{path} is not a usable GGUF file: {error}") from None

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """[nbytes] the tensor's bytes as they are in the file, not copied."""
        tensor = self.tensors[name]
        return np.frombuffer(self.buffer, np.uint8, tensor.nbytes, tensor.start)


class _MalformedError(Exception):
    pass


class _Reader:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.at = 0
        self.end = len(buffer)

    def take(self, count: int) -> int:
        """Step over ``count`` bytes; the offset at which they start."""
        start = self.at
        if count < 0 or count > self.end - start:
            raise _MalformedError(f"it ends at byte {self.end}, inside its header")
        self.at = start + count
        return start

    def scalar(self, kind: str) -> Any:
        return struct.unpack_from(kind, self.buffer, self.take(struct.calcsize(kind)))[0]

    def string(self) -> str:
        length = self.scalar("<Q")
        start = self.take(length)
        return _text(self.buffer[start : start + length])

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(depth)
        if kind not in _SCALARS:
            raise _MalformedError(f"unknown value type {kind} at byte {self.at}")
        return self.scalar(_SCALARS[kind])

    def array(self, depth: int) -> Any:
        kind = self.scalar("<I")
        count = self.scalar("<Q")
        if kind in _SCALARS:
            item = _SCALARS[kind]
            start = self.take(count * struct.calcsize(item))
            return np.frombuffer(self.buffer, np.dtype(item), count, start).copy()
        if kind == _STRING:
            return self.strings(count)
        if depth >= _MAX_NESTING:
            raise _MalformedError(f"arrays nested deeper than {_MAX_NESTING}")
        if count > (self.end - self.at) // 12:
            raise _MalformedError(f"an array of {count} entries does not fit in the file")
        return [self.value(kind, depth + 1) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        """A vocabulary is a quarter of a million of these: no call a string but for its text."""
        if count > (self.end - self.at) // 8:
            raise _MalformedError(f"an array of {count} strings does not fit in the file")
        buffer, at, end = self.buffer, self.at, self.end
        unpack = struct.Struct("<Q").unpack_from
        out: list[str] = []
        try:
            for _ in range(count):
                length = unpack(buffer, at)[0]
                at += 8
                if length > end - at:
                    raise _MalformedError(f"it ends at byte {end}, inside its header")
                out.append(buffer[at : at + length].decode())
                at += length
        except struct.error:
            raise _MalformedError(f"it ends at byte {end}, inside its header") from None
        except UnicodeDecodeError as error:
            raise _MalformedError(f"a string at byte {at} is not UTF-8 ({error.reason})") from None
        self.at = at
        return out


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _MalformedError(f"a string is not UTF-8 ({error.reason})") from None


def _parse(reader: _Reader, metadata: dict[str, Any], tensors: dict[str, GGUFTensor]) -> None:
    if reader.end < 24 or reader.buffer[:4] != _MAGIC:
        raise _MalformedError("it does not start with GGUF")
    reader.at = 4
    version = reader.scalar("<I")
    if version not in (2, 3):
        raise _MalformedError(f"version {version}; 2 and 3 are known")
    num_tensors = reader.scalar("<Q")
    num_values = reader.scalar("<Q")
    if max(num_tensors, num_values) > reader.end // 12:
        raise _MalformedError(
            f"{num_tensors} tensors and {num_values} values do not fit in the file"
        )
    for _ in range(num_values):
        key = reader.string()
        metadata[key] = reader.value(reader.scalar("<I"))
    infos = [_tensor_info(reader) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20:
        raise _MalformedError(f"alignment {alignment}")
    base = -(-reader.at // alignment) * alignment
    for name, kind, shape, offset in infos:
        if name in tensors:
            raise _MalformedError(f"tensor {name} appears twice")
        tensor = _place(name, kind, shape, base + offset)
        if tensor.start + tensor.nbytes > reader.end:
            raise _MalformedError(
                f"tensor {name} should end at byte {tensor.start + tensor.nbytes}, "
                f"the file ends at {reader.end}"
            )
        tensors[name] = tensor


def _tensor_info(reader: _Reader) -> tuple[str, int, tuple[int, ...], int]:
    name = reader.string()
    dims = reader.scalar("<I")
    if dims > _MAX_DIMS:
        raise _MalformedError(f"tensor {name} has {dims} dimensions")
    shape = tuple(reader.scalar("<Q") for _ in range(dims))[::-1]
    kind = reader.scalar("<I")
    return name, kind, shape, reader.scalar("<Q")


def _place(name: str, kind: int, shape: tuple[int, ...], start: int) -> GGUFTensor:
    if kind not in TENSOR_TYPES:
        known = ", ".join(known for known, _, _ in TENSOR_TYPES.values())
        raise _MalformedError(f"tensor {name} is of ggml type {kind}; known are {known}")
    type_name, block, block_bytes = TENSOR_TYPES[kind]
    count = 1
    for size in shape:
        count *= size
    row = shape[-1] if shape else 1
    if row % block:
        raise _MalformedError(f"tensor {name}: rows of {row} do not fill {type_name} blocks")
    return GGUFTensor(name, type_name, shape, start, count // block * block_bytes)
