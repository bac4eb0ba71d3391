# SPDX-License-Identifier: Apache-2.0
"""Builds ctxfix's C extension with the system's compiler if there is one; without it the package is pure Python.

BUILD_CTXFIX_NATIVE=off leaves the extension out, BUILD_CTXFIX_NATIVE=require makes a failure an error.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCES = ("_native.c", "driver.c", "fabric.c", "log.c", "slots.c", "threads.c")

FLAGS = [
    "-std=c11",
    "-O2",
    "-g0",
    "-fPIC",
    "-shared",
    "-Wall",
    "-fvisibility=hidden",
    "-fstack-protector-strong",
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
    # nodelete: hooked slots and running threads may point here for the life of the process.
    "-Wl,-z,relro,-z,now,-z,noexecstack,-z,nodelete",
]

ARCHITECTURE_FLAGS = {"x86_64": ["-fcf-protection=full"], "aarch64": ["-mbranch-protection=standard"]}


def abi3() -> bool:
    """Whether this interpreter takes extensions of the stable ABI (free-threaded ones do not)."""
    return not sysconfig.get_config_var("Py_GIL_DISABLED")


def file_name() -> str:
    """Name of the extension's file."""
    return "_native.abi3.so" if abi3() else f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


def compiler() -> list[str] | None:
    """The command of the C compiler, or None."""
    command = shlex.split(os.environ.get("CC", "cc"))
    return command if command and shutil.which(command[0]) else None


def build(folder: Path) -> str | None:
    """Compile the extension into ``folder``; the reason if it could not be."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} is not supported"
    cc = compiler()
    if cc is None:
        return "no C compiler was found"
    target = folder / file_name()
    unfinished = target.with_suffix(".tmp")
    command = [
        *cc,
        *FLAGS,
        *ARCHITECTURE_FLAGS.get(platform.machine(), []),
        f"-I{sysconfig.get_paths()['include']}",
        *shlex.split(os.environ.get("CFLAGS", "")),
        *(str(folder / source) for source in SOURCES),
        "-o",
        str(unfinished),
        "-ldl",
        "-lpthread",
        *shlex.split(os.environ.get("LDFLAGS", "")),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        unfinished.unlink(missing_ok=True)
        return f"{shlex.join(command)} failed:\n{result.stderr[-2000:]}"
    # A process that has the old file mapped keeps it.
    unfinished.replace(target)
    return None


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the extension into wheels and editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatchling about the file and the wheel's tag."""
        if self.target_name != "wheel":
            return
        wanted = os.environ.get("BUILD_CTXFIX_NATIVE", "auto")
        folder = Path(self.root) / "ctxfix" / "native"
        stale = folder / file_name()
        stale.unlink(missing_ok=True)
        problem = "switched off by BUILD_CTXFIX_NATIVE" if wanted == "off" else build(folder)
        if problem:
            if wanted == "require":
                raise RuntimeError(f"ctxfix: the C extension was not built: {problem}")
            self.app.display_warning(f"ctxfix: installed without its C extension: {problem}")
            return
        build_data["pure_python"] = False
        if abi3():
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp310-abi3-{system}"
        else:
            build_data["infer_tag"] = True
        build_data["artifacts"].append(f"ctxfix/native/{file_name()}")
