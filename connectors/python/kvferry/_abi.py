# SPDX-License-Identifier: Apache-2.0
"""The C library as cffi sees it.

What is declared comes from kvferry.h itself, which lies beside this file with the libraries that
it describes: the two always fit each other, and there is no second list of structs to keep.
"""
import os
import re
import threading
from pathlib import Path
from typing import Any, Optional

import cffi

_HERE = Path(__file__).resolve().parent
_LIBRARY = "libkvferry.so.0"
_GPU_LIBRARY = "libkvferry_gpu.so.0"
_ISAL = "libisal.so.2"  # in wheels; elsewhere it is the system's


def declarations(header: str) -> str:
    """The C declarations in the text of kvferry.h, without what only a compiler needs."""
    text = re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*#.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\bKVF_API\b", "", text)
    return re.sub(r'extern "C" \{(.*)\}', r"\1", text, flags=re.DOTALL)


def _folder() -> Path:
    """Where header and libraries are: beside this file, or where $KVFERRY_LIBRARY_DIR says."""
    named = os.environ.get("KVFERRY_LIBRARY_DIR")
    return Path(named) if named else _HERE


def _open(name: str) -> Any:
    path = _folder() / name
    try:
        return ffi.dlopen(str(path))
    except OSError as error:
        raise ImportError(f"{path}: {error}; install the wheel of `make wheel`, or set "
                          "KVFERRY_LIBRARY_DIR to a folder with kvferry.h and the libraries"
                          ) from error


ffi = cffi.FFI()
ffi.cdef(declarations((_folder() / "kvferry.h").read_text(encoding="utf-8")))
# What is open already satisfies a library that needs it by its name.
_isal = _open(_ISAL) if (_folder() / _ISAL).exists() else None
lib: Any = _open(_LIBRARY)

_gpu_lock = threading.Lock()
_gpu_lib: Optional[Any] = None


def gpu_lib() -> Any:
    """libkvferry_gpu, opened at the first call. It needs no GPU to be opened. Any thread."""
    global _gpu_lib
    with _gpu_lock:
        if _gpu_lib is None:
            _gpu_lib = _open(_GPU_LIBRARY)
        return _gpu_lib


def text(value: Any) -> str:
    """A C string as str."""
    return ffi.string(value).decode("utf-8", "replace")
