# SPDX-License-Identifier: Apache-2.0
"""Builds ctxfix's C extension with the system's compiler if there is one; without it the package is pure Python.

BUILD_CTXFIX_NATIVE=off leaves the extension out, BUILD_CTXFIX_NATIVE=require makes a failure an error. The same sources
and tools give the same bytes, wherever and whenever they are built. A list of what is in the wheel (SBOM) goes with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement

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
    "-fstack-clash-protection",
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=3",  # a libc or compiler that knows only 2 takes it as 2
    # nodelete: hooked slots and running threads may point here for the life of the process.
    "-Wl,-z,relro,-z,now,-z,noexecstack,-z,nodelete,-z,text",
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


def build(folder: Path, target: Path) -> str | None:
    """Compile the sources in ``folder`` into the file ``target``; the reason if it could not be."""
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} is not supported"
    cc = compiler()
    if cc is None:
        return "no C compiler was found"
    unfinished = target.with_suffix(".tmp")
    command = [
        *cc,
        *FLAGS,
        *ARCHITECTURE_FLAGS.get(platform.machine(), []),
        f"-ffile-prefix-map={folder.parents[1]}=.",  # where CFLAGS ask for -g
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


def sbom(core: Any, sources: Path | None) -> str:
    """What the wheel consists of and needs, as CycloneDX JSON, from the project's own metadata (hatchling's ``core``).

    ``sources``: the folder of what the extension was compiled from, if it was.
    """
    name = f"pkg:pypi/{core.name}@{core.version}"
    files = [
        {
            "type": "file",
            "name": f"ctxfix/native/{path.name}",
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
        }
        for path in sorted(sources.glob("*.[ch]") if sources is not None else ())
    ]
    needed = [(Requirement(text), "required") for text in core.dependencies]
    for extra, texts in core.optional_dependencies.items():
        if extra not in ("dev", "docs"):  # tools, which nothing in the wheel uses
            needed += [(Requirement(text), "optional") for text in texts]
    components: dict[str, dict[str, Any]] = {}
    for requirement, scope in needed:
        purl = f"pkg:pypi/{requirement.name}"
        components.setdefault(
            purl,
            {
                "type": "library",
                "bom-ref": purl,
                "name": requirement.name,
                "scope": scope,
                "purl": purl,
                "properties": [{"name": "requirement", "value": str(requirement)}],
            },
        )
    required = sorted(purl for purl, component in components.items() if component["scope"] == "required")
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": name,
                "name": core.name,
                "version": core.version,
                "licenses": [{"expression": core.license_expression}],
                "purl": name,
                "components": files,
            }
        },
        "components": [components[purl] for purl in sorted(components)],
        "dependencies": [{"ref": name, "dependsOn": required}],
    }
    return json.dumps(document, indent=2) + "\n"


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the extension into wheels and editable installs, and the list of contents into wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatchling about the files and the wheel's tag."""
        if self.target_name != "wheel":
            return
        self._scratch = tempfile.TemporaryDirectory(prefix="ctxfix-")  # goes with the process where a build fails
        sources = Path(self.root) / "ctxfix" / "native"
        compiled = self._compile(version, sources, build_data)
        listed = Path(self._scratch.name, "ctxfix.cdx.json")
        listed.write_text(sbom(self.metadata.core, sources if compiled else None))
        build_data["sbom_files"].append(str(listed))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Leave nothing behind."""
        if self.target_name == "wheel":
            self._scratch.cleanup()

    def _compile(self, version: str, sources: Path, build_data: dict[str, Any]) -> bool:
        wanted = os.environ.get("BUILD_CTXFIX_NATIVE", "auto")
        # An editable install needs the file in the tree; a wheel leaves the tree, which others may be using, alone.
        built = (sources if version == "editable" else Path(self._scratch.name)) / file_name()
        if version == "editable":
            built.unlink(missing_ok=True)
        problem = "switched off by BUILD_CTXFIX_NATIVE" if wanted == "off" else build(sources, built)
        if problem:
            if wanted == "require":
                raise RuntimeError(f"ctxfix: the C extension was not built: {problem}")
            self.app.display_warning(f"ctxfix: installed without its C extension: {problem}")
            return False
        build_data["pure_python"] = False
        if abi3():
            system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp310-abi3-{system}"
        else:
            build_data["infer_tag"] = True
        if version == "editable":
            build_data["artifacts"].append(f"ctxfix/native/{file_name()}")
        else:
            build_data["force_include"][str(built)] = f"ctxfix/native/{file_name()}"
        return True
