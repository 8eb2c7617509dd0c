"""Keep one GPU architecture's machine code in a shared library, so that it compresses to a tenth.

    python bench/prune_fatbin.py libtransformer_engine.so 90 pruned.so

The machine code of other architectures, and PTX, is overwritten by zeros. Headers and offsets are
unchanged, so the driver can still parse the library. TransformerEngine 2.20.2 for CUDA 13 has 343
MB; pruned to sm_90, `xz` compresses it to 25 MB. NVIDIA does not document the format: test a pruned
library on a GPU before you rely on it.
"""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

# Header of a fat binary: magic (4 bytes), version (2), bytes of this header (2), bytes of all
# entries (8).
MAGIC = 0xBA55ED50
# Header of an entry: kind (2 bytes), version (2), bytes of this header (4), bytes of its payload
# (8).
PTX = 1
# offset of the architecture in an entry's header
ARCHITECTURE_AT = 28


def section(library: Path) -> tuple[int, int]:
    """Find the fat binaries of ``library``; returns their first and last offset in the file.

    Raises:
        ValueError: if the library has no device code.
    """
    headers = subprocess.run(
        ["readelf", "-SW", library], capture_output=True, text=True, check=True
    )
    found = re.search(r"\.nv_fatbin\s+\S+\s+\S+\s+(\S+)\s+(\S+)", headers.stdout)
    if found is None:
        raise ValueError(f"{library} has no section .nv_fatbin")
    begin = int(found[1], 16)
    return begin, begin + int(found[2], 16)


def prune(data: bytearray, begin: int, end: int, keep: int) -> Counter[int]:
    """Zero the payloads of all architectures except ``keep``, in place.

    Args:
        data: content of the library.
        begin: first offset of the fat binaries.
        end: offset after the fat binaries.
        keep: architecture to keep, such as 90.

    Returns:
        Bytes by architecture.
    """
    sizes: Counter[int] = Counter()
    at = begin
    while at < end:
        magic, _, header, size = struct.unpack_from("<IHHQ", data, at)
        # Padding between fat binaries.
        if magic != MAGIC:
            at += 8
            continue
        entry = at + header
        at = entry + size
        while entry < at:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + ARCHITECTURE_AT)
            payload = entry + header
            sizes[architecture] += size
            if architecture != keep or kind == PTX:
                data[payload : payload + size] = bytes(size)
            entry = payload + size
    return sizes


def main() -> None:
    """Read, prune and write the library on the command line."""
    library = Path(sys.argv[1])
    keep = int(sys.argv[2])
    out = Path(sys.argv[3])
    data = bytearray(library.read_bytes())
    sizes = prune(data, *section(library), keep)
    if not sizes[keep]:
        raise SystemExit(f"{library} has no code for sm_{keep}; it has {sorted(sizes)}")
    out.write_bytes(data)
    print(", ".join(f"sm_{name}: {size / 1e6:.0f} MB" for name, size in sorted(sizes.items())))


if __name__ == "__main__":
    main()
