"""Floating-point operations of x86-64 machine instructions, as objdump decodes them.

A multiply-add counts 2 per lane; add, subtract, multiply, divide and square root count 1 per lane, horizontal adds
included, scalar and packed, SSE, AVX, AVX-512 and x87, fp16 to fp64.  Minimum, maximum, comparisons, conversions,
rounding, approximations, bit operations and moves count 0.  An AVX-512 instruction under a mask counts all its lanes.
"""

from __future__ import annotations

import mmap
import platform
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

_VECTOR = re.compile(r"v?(?P<op>add|sub|mul|div|sqrt|addsub|hadd|hsub)(?P<kind>[ps][shd])$")
_FUSED = re.compile(r"vfn?m(?:add|sub|addsub|subadd)(?:132|213|231)?(?P<kind>[ps][shd])$")
_BF16_DOT = re.compile(r"vdpbf16ps$")
_X87 = re.compile(r"fi?(?:add|sub|subr|mul|div|divr|sqrt)p?[slt]?$")
_ELEMENT_BYTES = {"h": 2, "s": 4, "d": 8}
_SLOT = 32  # bytes per instruction in the file given to objdump: the longest has 15, the rest is no-ops
_NO_OP = b"\x90"
_LISTED = re.compile(r"^ *([0-9a-f]*[02468ace]?0):\t(.*)$", re.MULTILINE)


def flops(instruction: str) -> int:
    """FLOPs of one instruction in objdump's AT&T form, such as "vfmadd231ps %ymm0,%ymm1,%ymm2"."""
    words = instruction.replace("{evex}", "").split()
    name = words[0] if words else ""
    if _X87.match(name):
        return 1
    if _BF16_DOT.match(name):
        return 4 * _lanes("ps", instruction)
    if fused := _FUSED.match(name):
        return 2 * _lanes(fused["kind"], instruction)
    if vector := _VECTOR.match(name):
        return _lanes(vector["kind"], instruction)
    return 0


def _lanes(kind: str, instruction: str) -> int:
    if kind[0] == "s":
        return 1
    register = next((size for name, size in (("%zmm", 64), ("%ymm", 32)) if name in instruction), 16)
    return register // _ELEMENT_BYTES[kind[1]]


def decode(addresses: Iterable[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """The instructions at these (object file, virtual address); those that cannot be decoded are left out.

    Each is decoded on its own, from where it was executed, so that data between functions cannot put the decoder out
    of step.  Addresses outside an ELF file's loaded parts (code made at run time) have no bytes to decode.
    """
    known, code = [], bytearray()
    images: dict[str, Image | None] = {}
    for path, address in addresses:
        if path not in images:
            images[path] = Image.open(path)
        image = images[path]
        found = image.code(address) if image else b""
        if found:
            known.append((path, address))
            code += found.ljust(_SLOT, _NO_OP)
    if not known:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(code)
        file.flush()
        command = ["objdump", "--disassemble-all", "--target=binary", "--architecture=i386:x86-64",
                   "--no-show-raw-insn", "--disassemble-zeroes", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {known[number]: instruction for number, instruction in slots(text)}


def slots(text: str) -> Iterable[tuple[int, str]]:
    """(slot, instruction) of objdump's listing: what stands at the start of each slot, unless it is invalid."""
    for line in _LISTED.finditer(text):
        offset, instruction = int(line[1], 16), line[2].strip()
        if offset % _SLOT == 0 and instruction and "(bad)" not in instruction:
            yield offset // _SLOT, instruction


class Image:
    """The parts of a 64-bit little-endian ELF file that are loaded as code; the file itself is mapped, not read."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self.data = data
        self.segments = []  # (virtual address, offset in the file, bytes)
        start, = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        for number in range(count):
            kind, rights, offset, address, _, length = struct.unpack_from("<IIQQQQ", data, start + number * size)
            if kind == 1 and rights & 1:
                self.segments.append((address, offset, length))

    @classmethod
    def open(cls, path: str) -> Image | None:
        if not Path(path).is_absolute() or not Path(path).is_file():
            return None
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return cls(data) if data[:6] == b"\x7fELF\x02\x01" else None

    def code(self, address: int) -> bytes:
        """Up to 15 bytes, the longest an instruction can be."""
        for start, offset, length in self.segments:
            if start <= address < start + length:
                first = offset + address - start
                return self.data[first:min(first + 15, offset + length)]
        return b""


def missing() -> str | None:
    """Why instructions cannot be decoded here, or None."""
    if platform.machine() != "x86_64":
        return f"instructions of {platform.machine()} are not decoded; counting needs an x86-64 machine."
    if shutil.which("objdump") is None:
        return "objdump was not found; install binutils (apt-get install binutils)."
    return None
