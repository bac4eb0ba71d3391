# SPDX-License-Identifier: Apache-2.0
"""Prepare and describe the rig: real NIXL wheels on a machine with no GPU.

Everything is made once, in the git-ignored folder .rig/ of the checkout: the fake CUDA driver and runtime
and the loopback fabric (compiled from this folder), the NIXL wheels (unpacked side by side, each in a folder
of its own) and the one library needed of the `mpich` wheel, a libfabric that is new enough for NIXL.

    rig = Rig.prepare()
    subprocess.run([sys.executable, "program.py"], env=rig.env("1.1.0", posts=Path("posts.jsonl")))
    for post in read_posts(Path("posts.jsonl")): ...

or, for the modes of transfer.py, all of that in one call: rig.transfer("1.1.0", "thread").
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
VERSIONS = ("1.1.0", "1.4.0")  # 1.5.1 too can be had, but its LIBFABRIC plugin needs a newer libfabric
MPICH = "5.0.2"
APT_LINE = "apt-get install -y gcc libc6-dev libfabric-dev libhwloc15"

# Anything of these that the caller's shell happens to have would change what the rig does.
_OWN_VARIABLES = ("FAKECUDA_", "RIG_", "FI_", "NIXL_", "UCX_", "HWLOC_", "CUDA_VISIBLE_DEVICES")

_CFLAGS = ("-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden")
_CUDA = "libcuda.so.1"
_LOOPBACK = "libloopback-fabric.so"


class RigError(RuntimeError):
    """The rig could not be prepared; the message says why."""


class MissingSystemPackage(RigError):
    """Something a distribution's package brings is not there; the message has the line to copy."""


class NoNixl(RigError):
    """There are no wheels of NIXL for this Python."""


@dataclass(frozen=True)
class Post:
    """One record of the loopback fabric.

    op is "write" or "read" (a post), "register" (a memory registration of GPU memory) or "completion" (a read
    of the completion queue that gave rc entries). owner and current are device ordinals, or None.
    verdict: "right", "wrong" (another context was current), "none" (no context was), "host" (not GPU memory),
    or "unknown" (a completion in a process that registered memory of several GPUs).
    """

    op: str
    pid: int
    tid: int
    buf: int
    len: int
    owner: int | None
    current: int | None
    verdict: str
    rc: int

    @property
    def is_post(self) -> bool:
        """Whether this is a transfer handed to the fabric and taken by it (not one to be tried again)."""
        return self.op in ("write", "read") and self.rc == 0


def read_posts(path: Path) -> list[Post]:
    """Read the records in the order they were written; no file means no records."""
    if not path.exists():
        return []
    names = {field.name for field in fields(Post)}
    lines = path.read_text().splitlines()
    return [Post(**{k: v for k, v in json.loads(line).items() if k in names}) for line in lines]


@dataclass(frozen=True)
class Run:
    """How a run of a program on the rig went: what it said, and what the fabric saw."""

    said: list[dict[str, Any]]  # the program's lines of JSON
    records: list[Post]
    log: Path  # all the program's output

    @property
    def result(self) -> dict[str, Any]:
        """The last of its lines."""
        return self.said[-1]

    @property
    def posts(self) -> list[Post]:
        """The transfers that the fabric took."""
        return [record for record in self.records if record.is_post]


@dataclass(frozen=True)
class Outcome(Run):
    """How a run of transfer.py went."""

    @property
    def verdicts(self) -> Counter[str]:
        """Count the posts by verdict."""
        return Counter(post.verdict for post in self.posts)

    @property
    def progress_gpus(self) -> set[int | None]:
        """In which GPUs' contexts NIXL's own threads, on both ends, took completions; None: in no context."""
        posting = {post.tid for post in self.posts}
        return {post.current for post in self.records if post.op == "completion" and post.tid not in posting}

    @property
    def done(self) -> bool:
        """Whether every transfer completed with the right bytes."""
        return self.result["state"] == "DONE" and self.result["data_ok"] and not self.result["error"]

    @property
    def context_kept(self) -> bool:
        """Whether each posting thread had the same contexts after its transfer as before."""
        return bool(self.result.get("context_kept"))


@dataclass(frozen=True)
class Rig:
    """The prepared pieces: folders, and the environment in which programs find them."""

    root: Path
    libraries: Path
    libfabric: Path
    nixl: dict[str, Path]

    @classmethod
    def prepare(
        cls,
        versions: Sequence[str] = VERSIONS,
        report: Callable[[str], None] = lambda line: None,
        root: Path | None = None,
    ) -> Rig:
        """Make what is missing and return the rig; `report` is told each step that takes time."""
        root = root or HERE.parents[1] / ".rig"
        root.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(root):
            libraries = _libraries(root, report)
            _need_hwloc()
            libfabric = _cached(root / f"libfabric-mpich-{MPICH}", lambda to: _libfabric(to, report))
            nixl = {version: _nixl(root, version, report) for version in versions}
        return cls(root, libraries, libfabric, nixl)

    @classmethod
    def driver_only(cls, report: Callable[[str], None] = lambda line: None, root: Path | None = None) -> Rig:
        """As prepare(), without NIXL and libfabric: for tests that need no more than the fake driver."""
        root = root or HERE.parents[1] / ".rig"
        root.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(root):
            return cls(root, _libraries(root, report), root, {})

    def env(
        self,
        nixl: str | None = None,
        *,
        posts: Path | None = None,
        torch_stub: bool = True,
        **extra: str,
    ) -> dict[str, str]:
        """Return the complete environment for a child process.

        Without a NIXL version the fabric is left out, which leaves the fake CUDA driver and runtime.
        torch_stub puts an empty module named torch last on the path, which NIXL 1.1.0 needs to be imported.
        """
        env = {k: v for k, v in os.environ.items() if not k.startswith(_OWN_VARIABLES)}
        libraries, modules = [self.libraries], []
        if nixl is not None:
            libraries.append(self.libfabric)
            modules.append(self.nixl[nixl])
            if torch_stub:
                modules.append(HERE / "torch_stub")
            _prepend(env, "LD_PRELOAD", [self.libraries / _LOOPBACK])
            env["HWLOC_XMLFILE"] = str(self.libraries / "topo.xml")
        _prepend(env, "LD_LIBRARY_PATH", libraries)
        _prepend(env, "PYTHONPATH", modules)
        if posts is not None:
            env["RIG_POSTS"] = str(posts)
        env.update(extra)
        return env

    def run(
        self,
        name: str,
        command: Sequence[str],
        env: dict[str, str],
        seconds: float,
        said: str,
        cwd: Path | None = None,
    ) -> Run:
        """Run a program, its output and its posts in .rig/runs/; `said` is what its lines of JSON begin with.

        After `seconds` all of its processes are killed, and its log says so.
        """
        runs = self.root / "runs"
        runs.mkdir(exist_ok=True)
        log = runs / f"{name}-{os.getpid()}.log"
        posts = log.with_suffix(".jsonl")
        posts.unlink(missing_ok=True)
        env = {**env, "RIG_POSTS": str(posts)}
        with log.open("w") as out:
            process = subprocess.Popen(
                command, env=env, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            # Should it hang, or should we be interrupted, all of them go: NIXL tries again for ever when its peer is
            # dead.
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                out.write(f"\nno end after {seconds} s\n")
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        lines = log.read_text(errors="replace").splitlines()
        return Run([json.loads(line) for line in lines if line.startswith(said)], read_posts(posts), log)

    def transfer(
        self, nixl: str, mode: str, *options: str, name: str | None = None, deadline: float = 40, **extra: str
    ) -> Outcome:
        """Run transfer.py once; `name` names its log, `extra` goes into its environment."""
        command = [sys.executable, str(HERE / "transfer.py"), mode, "--deadline", str(deadline), *options]
        # transfer.py kills its children at the deadline itself.
        run = self.run(name or f"{mode}-{nixl}", command, self.env(nixl, **extra), deadline + 20, '{"mode"')
        failed = {"mode": mode, "state": "CRASH", "data_ok": False, "error": f"no result, see {run.log}"}
        return Outcome(run.said or [failed], run.records, run.log)


def _prepend(env: dict[str, str], name: str, paths: Sequence[Path]) -> None:
    before = [env[name]] if env.get(name) else []
    if paths or before:
        env[name] = os.pathsep.join([*map(str, paths), *before])


# ---- the folder .rig/ ----------------------------------------------------------------------------


@contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Let a second process wait for the first, and sweep up what killed ones left behind.

    The kernel drops the lock of a process that dies.
    """
    with (root / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for unfinished in root.glob("*.new-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        for log in root.glob("runs/*"):
            if log.stat().st_mtime < time.time() - 86400:
                log.unlink(missing_ok=True)
        yield


def _cached(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`, filled by `make` if it is not there.

    It appears under its name only when complete, so a run that dies leaves nothing that looks finished.
    """
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.new-") as temporary:
            fresh = Path(temporary) / "folder"
            fresh.mkdir()
            make(fresh)
            fresh.rename(folder)
    return folder


# ---- compiled parts ------------------------------------------------------------------------------


def _compiler() -> str:
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise MissingSystemPackage(f"no C compiler found. As root: {APT_LINE}")
    return compiler


def _libraries(root: Path, report: Callable[[str], None]) -> Path:
    compiler = _compiler()
    digest = hashlib.sha256(" ".join([compiler, *_CFLAGS]).encode())
    for source in sorted(HERE.glob("*.[ch]")) + [HERE / "fabric.map", Path(__file__)]:
        digest.update(source.read_bytes())
    return _cached(root / f"lib-{digest.hexdigest()[:16]}", lambda to: _compile(compiler, to, report))


def _compile(compiler: str, to: Path, report: Callable[[str], None]) -> None:
    report("compiling the fake CUDA driver and the loopback fabric")
    _need_headers(compiler)

    def build(source: str, library: str, *options: str) -> None:
        command = [compiler, *_CFLAGS, f"-Wl,-soname,{library}", str(HERE / source), "-o", str(to / library)]
        done = subprocess.run([*command, *options, "-ldl", "-lpthread"], capture_output=True, text=True)
        if done.returncode:
            raise RigError(f"{source} does not compile:\n{done.stderr}")

    build("fakecuda.c", _CUDA)
    for runtime in ("libcudart.so.12", "libcudart.so.13"):
        # The wheels ask for symbols whose version is the library's name.
        build("fakecudart.c", runtime, "-Wl,--default-symver", str(to / _CUDA))
    build("fabric.c", _LOOPBACK, "-fvisibility=default", f"-Wl,--version-script={HERE / 'fabric.map'}")
    (to / "topo.xml").write_text(topology())


def _need_headers(compiler: str) -> None:
    for header in ("stdio.h", "rdma/fabric.h"):
        check = [compiler, "-E", "-x", "c", "-"]
        if subprocess.run(check, input=f"#include <{header}>\n", capture_output=True, text=True).returncode:
            raise MissingSystemPackage(f"the C header {header} is missing. As root: {APT_LINE}")


def _need_hwloc() -> None:
    try:
        ctypes.CDLL("libhwloc.so.15")
    except OSError:
        raise MissingSystemPackage(f"libhwloc.so.15 is missing, NIXL needs it. As root: {APT_LINE}") from None


def topology(gpus: int = 8, efas: int = 8) -> str:
    """Return the machine that hwloc shows to NIXL: GPUs and EFA devices at the fakes' PCI addresses."""
    sets = " ".join(f'{name}="0x1"' for name in ("cpuset", "complete_cpuset", "nodeset", "complete_nodeset"))
    pci = [(0x10 + i, "0302 [10de:2330] [10de:16c1] a1") for i in range(gpus)]
    pci += [(0x20 + i, "0200 [1d0f:efa2] [1d0f:efa2] 00") for i in range(efas)]
    devices = "\n".join(
        f'<object type="PCIDev" gp_index="{7 + i}" name="fake" pci_busid="0000:{bus:02x}:00.0" '
        f'pci_type="{kind}" pci_link_speed="15.753846"/>'
        for i, (bus, kind) in enumerate(pci)
    )
    return f"""<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
<object type="Machine" os_index="0" {sets} allowed_cpuset="0x1" allowed_nodeset="0x1" gp_index="1">
<object type="Package" os_index="0" {sets} gp_index="2">
<object type="NUMANode" os_index="0" {sets} gp_index="3" local_memory="1073741824"/>
<object type="PU" os_index="0" {sets} gp_index="4"/>
<object type="Bridge" gp_index="5" bridge_type="0-1" depth="0" bridge_pci="0000:[00-2f]">
<object type="Bridge" gp_index="6" bridge_type="1-1" depth="1" bridge_pci="0000:[10-2f]" \
pci_busid="0000:00:01.0" pci_type="0604 [1d0f:0200] [1d0f:0200] 00" pci_link_speed="15.753846">
{devices}
</object>
</object>
</object>
</object>
</topology>
"""


# ---- downloaded parts ----------------------------------------------------------------------------


def _nixl(root: Path, version: str, report: Callable[[str], None]) -> Path:
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NoNixl("NIXL has no wheels for a Python without a GIL")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return _cached(root / f"nixl-{version}-{tag}", lambda to: _unpack(f"nixl-cu12=={version}", to, report))


def _libfabric(to: Path, report: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(dir=to.parent) as temporary:
        _unpack(f"mpich=={MPICH}", Path(temporary), report)
        library = next(Path(temporary).rglob("libfabric.so.1"), None)
        if library is None:
            raise RigError(f"the wheel of mpich {MPICH} has no libfabric.so.1")
        # Alone in its folder: the wheel's other libraries must not be found through LD_LIBRARY_PATH.
        shutil.copy(library, to)


def _unpack(requirement: str, to: Path, report: Callable[[str], None]) -> None:
    report(f"downloading {requirement}")
    with tempfile.TemporaryDirectory(dir=to.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--only-binary=:all:", "--dest", temporary, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            python = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise RigError(f"pip could not download {requirement} for Python {python}:\n{done.stderr.strip()}")
        for wheel in Path(temporary).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(to)


if __name__ == "__main__":
    try:
        prepared = Rig.prepare(report=print)
    except RigError as error:
        sys.exit(f"rig: {error}")
    print(f"ready in {prepared.root}")
