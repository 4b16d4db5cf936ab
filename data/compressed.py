"""Files packed with gzip, bzip2, xz or Zstandard (told by their first bytes), as the bytes within."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from data.errors import DataError

ENDINGS = (".gz", ".bz2", ".xz", ".zst")


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """The bytes of a file from its start, unpacked; DataError where the packing is damaged or cut off."""
    with path.open("rb") as plain:
        start = plain.read(6)
    unpack = next((way for mark, way in _WAYS.items() if start.startswith(mark)), _as_it_is)
    try:
        with unpack(path) as stream:
            yield stream
    except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        # What unpacks raises an OSError without a number; one with a number is the disk's.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"the compressed file is damaged or cut off ({error}); fetch it again") from error


def bare(name: str) -> str:
    """A file's name in lower case, without the ending of its packing."""
    known = name.lower()
    return next((known.removesuffix(ending) for ending in ENDINGS if known.endswith(ending)), known)


def _as_it_is(path: Path) -> BinaryIO:
    return path.open("rb")


def _zstandard(path: Path) -> io.BufferedReader:
    import pyarrow

    stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return io.BufferedReader(stream)


_WAYS: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.GzipFile,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\0": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": _zstandard,
}
