# SPDX-License-Identifier: Apache-2.0
"""Engines with a native worker each, one a GPU; a line of JSON tells what their threads could do with their memory.

workers.py LIBRARY HOW     HOW: bare | memory (native_threads(memory)) | current (native_threads() where it is current)
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rig"))

from transfer import GpuMemory, make_current

import ctxfix


def main() -> None:
    library, how = ctypes.CDLL(sys.argv[1]), sys.argv[2]
    library.engine_new.restype = ctypes.c_void_p
    library.engine_look.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_int)]
    memories = [GpuMemory(gpu, 1 << 20) for gpu in range(3)]
    engines = []
    for memory in memories:
        inherit = contextlib.nullcontext()
        if how == "memory":
            inherit = ctxfix.native_threads(memory.address)
        elif how == "current":
            make_current(memory.gpu)
            inherit = ctxfix.native_threads()
        with inherit:
            engines.append(library.engine_new())
    answers = []
    for engine, memory in zip(engines, memories, strict=True):
        four = (ctypes.c_int * 4)()
        library.engine_look(engine, memory.address, four)
        answers.append(list(four))
    driver = ctypes.CDLL("libcuda.so.1")
    contexts = [driver.fakecuda_contexts(gpu) for gpu in range(4)]
    print(json.dumps({"answers": answers, "contexts": contexts}))


if __name__ == "__main__":
    main()
