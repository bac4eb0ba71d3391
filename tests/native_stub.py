# SPDX-License-Identifier: Apache-2.0
"""The stub driver, the stand-ins for libfabric and the thread libraries that the C extension is tested against."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from ctxfix import native

RIG = Path(__file__).parent / "native_rig"
SOURCES = Path(native.__file__).parent
CC = shutil.which("cc")


def compile_c(target: Path, *arguments: str | Path) -> Path:
    command = [str(CC), "-std=c11", "-O1", "-g", "-w", *map(str, arguments), "-o", str(target)]
    subprocess.run(command, check=True, timeout=60)
    return target


def environment(rig: Path, **extra: str) -> dict[str, str]:
    """For a process that runs a case on the libraries in ``rig``."""
    return {
        **os.environ,
        "CTXFIX_DISABLE": "1",  # the case itself decides what is hooked
        "RIG": str(rig),
        "LD_LIBRARY_PATH": str(rig),
        "PYTHONPATH": str(SOURCES.parents[1]),
        **extra,
    }


def build(folder: Path) -> None:
    """Put into ``folder`` the stub driver and runtime, two kinds of libfabric, and the libraries that start threads."""
    shared = ["-shared", "-fPIC", f"-L{folder}", f"-Wl,-rpath,{folder}"]

    def library(name: str, *arguments: str | Path) -> None:
        compile_c(folder / name, *shared, f"-Wl,-soname,{name}", *arguments)

    library("libcuda.so.1", RIG / "cuda.c", "-lpthread")
    library("libcudart.so.99", "-DRUNTIME", RIG / "cuda.c", folder / "libcuda.so.1")
    cuda = [folder / "libcuda.so.1", folder / "libcudart.so.99"]
    library("libnext.so", RIG / "next.c")
    library("libfabric.so.1", RIG / "fabric.c", "-Wl,--no-as-needed", folder / "libnext.so", "-ldl")
    library("libfabric-linked.so.1", "-DLINKED", RIG / "fabric.c", *cuda)
    for binding in ("lazy", "now"):
        library(f"libthreads-{binding}.so", RIG / "threads.c", *cuda, f"-Wl,-z,{binding},-z,relro", "-lpthread")
    library("libplugin_LIBFABRIC.so", "-DPLUGIN", RIG / "threads.c", *cuda, "-lpthread")
    library("libloader.so", "-DLOADER", RIG / "threads.c", "-ldl")
