# SPDX-License-Identifier: Apache-2.0
"""``ctxfix doctor``: what in this machine and environment decides the path of transfers, with the reason and the cure.

Each check is a small function of :class:`Surroundings`, so that each fault can be shown to it.
"""

from __future__ import annotations

import ctypes
import glob
import importlib
import json
import os
import re
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from ctxfix._status import version_of
from ctxfix.evidence import efa

OK, NOTE, BAD, UNKNOWN = "ok", "note", "bad", "unknown"
_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    state: str
    what: str
    why: str = ""
    cure: str = ""


class Library(NamedTuple):
    """A libfabric on this machine."""

    path: str
    version: tuple[int, int] | None
    cuda: bool
    problem: str = ""  # why it cannot be loaded


@dataclass
class Surroundings:
    """All that the checks look at."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: str = "/"
    nvml: Any = None
    version_of: Callable[[str], str | None] = version_of
    libraries: Callable[[], list[Library]] = lambda: find_libraries(os.environ)
    status: Callable[[], dict[str, Any]] = lambda: _status()
    shm: Callable[[], os.statvfs_result] = lambda: os.statvfs("/dev/shm")
    #: Memory in bytes, and CPUs.
    host: Callable[[], tuple[int, int]] = lambda: (
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        os.sysconf("SC_NPROCESSORS_ONLN"),
    )

    def path(self, *parts: str) -> str:
        """A path under the root."""
        return os.path.join(self.root, *parts)


Check = Callable[[Surroundings], Iterator[Finding]]
_checks: list[Check] = []


def _check(function: Check) -> Check:
    _checks.append(function)
    return function


# ---- ctxfix itself ---------------------------------------------------------------------------------------------------


@_check
def activation(around: Surroundings) -> Iterator[Finding]:
    """Whether ctxfix is on, here and in new interpreters."""
    status = around.status()
    if not status["active"]:
        yield Finding(
            "ctxfix", BAD, f"off: {status['reason']}", "nothing is bound", "unset CTXFIX_DISABLE, or import ctxfix"
        )
    files = status["start_files"]
    if any(file["runs"] for file in files):
        yield Finding("start-up file", OK, next(file["path"] for file in files if file["runs"]))
    else:
        where = f"{files[0]['path']}: {files[0]['reason']}" if files else "not found"
        yield Finding(
            "start-up file",
            BAD,
            where,
            "servers and their workers start without ctxfix",
            "pip install ctxfix into the environment's own site-packages, or start them by: ctxfix run -- CMD",
        )
    for name, target in status["targets"].items():
        if target["state"].startswith("failed"):
            yield Finding(
                name, BAD, target["reason"], "its calls are as shipped", "report it, with `ctxfix status --json`"
            )
    for problem in status["settings"].get("problems", []):
        yield Finding("settings", BAD, problem, "", "correct or unset the variable")
    native = status["native"]
    if native["available"]:
        yield Finding("native part", OK, "built: native threads inherit, libfabric's CUDA calls are bound and counted")
    else:
        yield Finding(
            "native part",
            BAD,
            f"missing: {native['reason']}",
            "the receiver's progress thread works through GPU 0, and no path can be proven",
            "install a C compiler and reinstall: "
            "pip install --force-reinstall --no-deps --no-cache-dir --no-binary ctxfix ctxfix",
        )


@_check
def sglang_plugins(around: Surroundings) -> Iterator[Finding]:
    """SGLang's list of allowed plugins."""
    allowed = around.environ.get("SGLANG_PLUGINS")
    if allowed is not None and "ctxfix" not in re.split(r"[,\s]+", allowed):
        yield Finding(
            "SGLANG_PLUGINS",
            NOTE,
            f"{allowed!r} does not name ctxfix",
            "SGLang will not load ctxfix as a plugin; the start-up file still does its work",
            f"SGLANG_PLUGINS={','.join(filter(None, (allowed, 'ctxfix')))}",
        )


# ---- libfabric's variables -------------------------------------------------------------------------------------------


@_check
def libfabric_log(around: Surroundings) -> Iterator[Finding]:
    """Whether libfabric would say that it falls back."""
    level, providers = around.environ.get("FI_LOG_LEVEL"), around.environ.get("FI_LOG_PROV")
    if not level:
        yield Finding(
            "FI_LOG_LEVEL",
            NOTE,
            "not set",
            "libfabric says nothing at all, also when it falls back to SAR",
            "FI_LOG_LEVEL=warn",
        )
    if providers and "shm" not in re.split(r"[,;\s^]+", providers):
        yield Finding(
            "FI_LOG_PROV",
            BAD,
            providers,
            "it hides the line that tells of SAR: that comes from shm, not from efa",
            "unset FI_LOG_PROV",
        )
    elif providers and providers.startswith("^"):
        yield Finding("FI_LOG_PROV", BAD, providers, "it hides what shm says", "unset FI_LOG_PROV")


@_check
def libfabric_variables(around: Surroundings) -> Iterator[Finding]:
    """Variables that choose the path inside libfabric."""
    off = ("0", "false", "no", "off", "n")
    environ = around.environ

    def value(name: str) -> str:
        return environ.get(name, "").strip().lower()

    if value("FI_EFA_ENABLE_SHM_TRANSFER") in off:
        yield Finding(
            "FI_EFA_ENABLE_SHM_TRANSFER",
            NOTE,
            "0",
            "peers on this host are reached through the EFA device: no CUDA IPC, and no SAR either",
            "unset it for CUDA IPC",
        )
    ifaces = environ.get("FI_HMEM")
    if ifaces and "cuda" not in ifaces.lower():
        yield Finding("FI_HMEM", BAD, ifaces, "libfabric will not handle CUDA memory", "unset it, or add cuda")
    if value("FI_HMEM_DISABLE_P2P") in ("1", "true", "yes", "on", "y"):
        yield Finding(
            "FI_HMEM_DISABLE_P2P", BAD, "1", "libfabric will move GPU memory through the host only", "unset it"
        )
    if value("FI_HMEM_CUDA_ENABLE_XFER") in off:
        yield Finding("FI_HMEM_CUDA_ENABLE_XFER", BAD, "0", "libfabric may not copy with CUDA: no CUDA IPC", "unset it")
    if value("FI_HMEM_CUDA_USE_GDRCOPY") in ("1", "true", "yes", "on", "y"):
        yield Finding(
            "FI_HMEM_CUDA_USE_GDRCOPY",
            NOTE,
            "1",
            "small messages go through the host by gdrcopy, silently: CUDA IPC cannot be proven for them",
            "FI_HMEM_CUDA_USE_GDRCOPY=0",
        )
    provider = environ.get("FI_PROVIDER")
    if provider and "efa" not in provider:
        yield Finding("FI_PROVIDER", NOTE, provider, "NIXL's LIBFABRIC backend looks for efa", "unset it")


# ---- memory and processes --------------------------------------------------------------------------------------------


@_check
def expandable_segments(around: Surroundings) -> Iterator[Finding]:
    """PyTorch memory that cannot be shared by legacy CUDA IPC."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if re.search(r"expandable_segments\s*:\s*true", around.environ.get(name, ""), re.IGNORECASE):
            yield Finding(
                name,
                BAD,
                "expandable_segments:True",
                "such memory belongs to no context and has no legacy IPC handle: transfers hang, fail, or bring WRONG "
                "bytes with NIXL 1.1.0 and 1.4.0 on libfabric 2.4.0",
                "expandable_segments:False for processes that transfer",
            )


@_check
def visible_devices(around: Surroundings) -> Iterator[Finding]:
    """Which GPUs the processes may see."""
    visible = around.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return
    devices = [device for device in visible.split(",") if device.strip()]
    if not devices or devices[0].strip() == "-1":
        yield Finding("CUDA_VISIBLE_DEVICES", BAD, repr(visible), "no GPU is visible", "unset it")
    elif len(devices) == 1:
        yield Finding(
            "CUDA_VISIBLE_DEVICES",
            NOTE,
            visible,
            "a single GPU: threads cannot land on a wrong one, but memory of a peer's other GPU cannot be opened by "
            "CUDA IPC here, and those transfers go through the host",
            "let prefill and decode see each other's GPUs",
        )


@_check
def shared_memory(around: Surroundings) -> Iterator[Finding]:
    """The size of /dev/shm, in which libfabric's shm keeps its queues and bounce buffers."""
    try:
        info = around.shm()
    except OSError as error:
        yield Finding("/dev/shm", BAD, f"{error.strerror}", "libfabric's shm cannot work", "mount a tmpfs there")
        return
    free = info.f_bavail * info.f_frsize
    if free < 64 << 20 or info.f_blocks * info.f_frsize <= 64 << 20:
        yield Finding(
            "/dev/shm",
            BAD,
            f"{free >> 20} MiB free",
            "each endpoint of each rank needs some MiB there; without, peers cannot be reached (SIGBUS, or no start)",
            "docker run --shm-size 8g or --ipc host; in Kubernetes an emptyDir with medium: Memory",
        )
    elif free < _GIB:
        yield Finding("/dev/shm", NOTE, f"{free >> 20} MiB free", "little for many ranks", "docker run --shm-size 8g")
    else:
        yield Finding("/dev/shm", OK, f"{free / _GIB:.1f} GiB free")


@_check
def namespaces(around: Surroundings) -> Iterator[Finding]:
    """Containers: CUDA IPC and shm need both ends in one PID and IPC namespace."""
    environ = around.environ
    inside = os.path.exists(around.path(".dockerenv")) or "KUBERNETES_SERVICE_HOST" in environ or "container" in environ
    if inside:
        yield Finding(
            "container",
            NOTE,
            "this is a container",
            "prefill and decode in separate PID or IPC namespaces cannot use CUDA IPC, as if their contexts were wrong",
            "put both into one container, or share: docker --pid and --ipc, Kubernetes shareProcessNamespace",
        )
    try:
        with open(around.path("proc/sys/kernel/yama/ptrace_scope")) as file:
            scope = int(file.read())
    except (OSError, ValueError):
        return
    if scope:
        yield Finding(
            "ptrace_scope",
            NOTE,
            str(scope),
            "shm may not copy host memory between processes directly (CMA); GPU memory is not concerned",
            "sysctl kernel.yama.ptrace_scope=0",
        )


# ---- GPUs and network ------------------------------------------------------------------------------------------------


@_check
def gpus(around: Surroundings) -> Iterator[Finding]:
    """Peer access, MIG and compute mode, as NVML tells."""
    nvml = around.nvml
    try:
        if nvml is None:
            nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - the package or the driver is absent, in the way of its version
        yield Finding(
            "GPUs", UNKNOWN, f"NVML is not there: {type(error).__name__}: {error}", "no GPU, or no driver, here"
        )
        return
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        refused = [
            f"{i}-{j}"
            for i, first in enumerate(handles)
            for j, second in enumerate(handles)
            if i < j and nvml.nvmlDeviceGetP2PStatus(first, second, _P2P_READ) != nvml.NVML_P2P_STATUS_OK
        ]
        if refused:
            yield Finding(
                "peer access",
                BAD,
                f"not between GPUs {', '.join(refused[:8])}{' …' if len(refused) > 8 else ''}",
                "libfabric gives up CUDA IPC for ALL GPUs, silently, if neighbouring ones cannot reach each other",
                "check nvidia-smi topo -p2p r; disable ACS/IOMMU translation, or choose GPUs that are connected",
            )
        else:
            yield Finding("peer access", OK, f"between all of {len(handles)} GPUs")
        for index, handle in enumerate(handles):
            yield from _gpu_modes(nvml, index, handle)
        yield from _mapping_cache(around, max((nvml.nvmlDeviceGetMemoryInfo(h).total for h in handles), default=0))
    except Exception as error:  # noqa: BLE001
        yield Finding("GPUs", UNKNOWN, f"NVML could not say: {type(error).__name__}: {error}")
    finally:
        nvml.nvmlShutdown()


#: NVML_P2P_CAPS_INDEX_READ of nvml.h; nvidia-ml-py 13 gives a tuple by that name, which its own function refuses.
_P2P_READ = 0


def _gpu_modes(nvml: Any, index: int, handle: Any) -> Iterator[Finding]:
    try:
        mig = nvml.nvmlDeviceGetMigMode(handle)[0]
    except Exception:  # noqa: BLE001 - a GPU without MIG
        mig = 0
    if mig:
        yield Finding(
            f"GPU {index}", BAD, "MIG is on", "CUDA IPC does not work between MIG instances", "nvidia-smi -mig 0"
        )
    if nvml.nvmlDeviceGetComputeMode(handle) == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS:
        yield Finding(
            f"GPU {index}",
            BAD,
            "compute mode is EXCLUSIVE_PROCESS",
            "prefill and decode cannot share this GPU, and a stray context of one rank keeps another rank out",
            "nvidia-smi -c DEFAULT",
        )


def _mapping_cache(around: Surroundings, gpu_bytes: int) -> Iterator[Finding]:
    """How much of its peers' GPU memory a receiver keeps mapped (libfabric 2.4.0 to its head after 2.6.0).

    By default the host's memory over twice its CPUs (ofi_default_cache_size in util_mem_monitor.c). The IPC cache lets
    the least recently used mapping go, so a KV pool larger than that misses for each of its layers, in every transfer.
    """
    given = around.environ.get("FI_MR_CACHE_MAX_SIZE", "").strip()
    ram, cpus = around.host()
    limit = int(given) if given.isdecimal() and int(given) else ram // cpus // 2
    if limit < gpu_bytes:
        yield Finding(
            "FI_MR_CACHE_MAX_SIZE",
            NOTE,
            f"a receiver keeps at most {limit / _GIB:.1f} GiB of its peers' GPU memory mapped, and a GPU here has "
            f"{gpu_bytes / _GIB:.0f} GiB",
            "each transfer of a KV pool larger than that opens and closes an IPC handle for each of its layers",
            f"FI_MR_CACHE_MAX_SIZE={gpu_bytes}",
        )


@_check
def network(around: Surroundings) -> Iterator[Finding]:
    """EFA devices and their counters."""
    found = efa.read(around.path("sys/class/infiniband"))
    if not found["known"]:
        why = "NIXL's LIBFABRIC backend needs EFA; without counters the NIC path cannot be proven"
        yield Finding("EFA", NOTE, found["reason"], why)
    else:
        yield Finding("EFA", OK, f"{len(found['counters'])} ports with counters")


# ---- versions --------------------------------------------------------------------------------------------------------

#: What was run or read, by exact version: later is not better (1.3.2 lacks what 1.3.1 has).
_SENDER_BOUND = {"1.3.1", "1.4.0", "1.5.0", "1.5.1"}
_SENDER_BARE = {"0.9.0", "0.10.0", "0.10.1", "1.0.0", "1.0.1", "1.1.0", "1.2.0", "1.3.0", "1.3.2"}


@_check
def nixl(around: Surroundings) -> Iterator[Finding]:
    """NIXL's own holes."""
    found = False
    targets = around.status()["targets"]
    for name in ("nixl-cu12", "nixl-cu13", "nixl-rocm"):
        version = around.version_of(name)
        target = targets.get(f"{name.replace('-', '_')}._api", {"state": "not installed"})
        if version is None and target["state"] == "not installed":
            continue
        found = True
        receiver = "its receiver's progress thread has no context either (every version to 1.5.1)"
        if version is None:
            why = "the module is there, and no metadata (dist-info) tells its version"
            yield Finding(name, NOTE, "of unknown version", why, "ctxfix verify shows what it does")
        elif version in _SENDER_BARE:
            yield Finding(
                name,
                BAD,
                version,
                f"it posts in whatever context the calling thread has: SAR on ranks from 1 on; {receiver}",
                "keep ctxfix active",
            )
        elif version in _SENDER_BOUND:
            yield Finding(name, NOTE, version, f"it binds the thread that posts; {receiver}", "keep ctxfix active")
        else:
            yield Finding(name, NOTE, version, "not a version that was looked at", "ctxfix verify shows what it does")
    if not found:
        yield Finding("NIXL", UNKNOWN, "not installed in this environment")


@_check
def libfabric(around: Surroundings) -> Iterator[Finding]:
    """The libfabric that NIXL's plugin will find."""
    libraries = around.libraries()
    if not libraries:
        yield Finding("libfabric", BAD, "no libfabric.so.1 is found", "NIXL's LIBFABRIC backend cannot load",
                      "install the EFA installer, and put /opt/amazon/efa/lib on LD_LIBRARY_PATH")  # fmt: skip
        return
    first = libraries[0]
    version = ".".join(map(str, first.version)) if first.version else "of unknown version"
    named = f"{version} ({first.path})"
    if first.problem:
        yield Finding("libfabric", BAD, f"{first.path} cannot be loaded: {first.problem}", "NIXL's LIBFABRIC backend "
                      "cannot load it either", "reinstall it, or let LD_LIBRARY_PATH name another")  # fmt: skip
    elif first.version and first.version < (1, 20):
        yield Finding("libfabric", BAD, named, "NIXL needs 1.20 or newer", "install the EFA installer's libfabric")
    elif not first.cuda:
        yield Finding("libfabric", BAD, named, "it has no CUDA support: GPU memory cannot be registered, or is copied "
                      "by the host", "use a libfabric with CUDA support, such as the EFA installer's")  # fmt: skip
    elif first.version and first.version <= (2, 6):
        yield Finding(
            "libfabric",
            NOTE,
            named,
            "its receiver announces a copy before it has ended, so that a reader on another stream may see old bytes",
            "keep ctxfix active with CTXFIX_SYNC_MEMOPS=auto",
        )
    else:
        yield Finding("libfabric", OK, named)
    if len(libraries) > 1:
        others = ", ".join(library.path for library in libraries[1:])
        yield Finding(
            "several libfabrics",
            NOTE,
            f"also {others}",
            "two in one process keep two sets of settings and counts; which is found first depends on LD_LIBRARY_PATH",
            "let LD_LIBRARY_PATH name one",
        )


def find_libraries(environ: Mapping[str, str], defaults: tuple[str, ...] = ()) -> list[Library]:
    """Every libfabric.so.1 that a program started here may find, the first one first."""
    folders = [folder for folder in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if folder]
    folders += defaults or (
        "/opt/amazon/efa/lib", "/opt/amazon/efa/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64", "/usr/local/lib",
    )  # fmt: skip
    seen: dict[str, Library] = {}
    for folder in folders:
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "libfabric.so.1"))):
            real = os.path.realpath(path)
            if real not in seen:
                seen[real] = _look_at(path)
    return list(seen.values())


def _look_at(path: str) -> Library:
    cuda = False
    try:
        cuda = b"cudaIpcGetMemHandle" in _whole(path)
        number = int(ctypes.CDLL(path).fi_version())
    except OSError as error:
        return Library(path, None, cuda, (error.strerror or str(error)).removeprefix(f"{path}: "))
    except AttributeError:
        return Library(path, None, cuda)
    return Library(path, (number >> 16, number & 0xFFFF), cuda)


def _whole(path: str) -> bytes:
    """The library's bytes. Raises OSError if it is none, or cut short: to load that would kill us (SIGBUS)."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # to open a FIFO waits for ever
        raise OSError("it is no file")
    with open(path, "rb") as file:
        data = file.read()
    if _cut_short(data):
        raise OSError("it is cut short")
    return data


#: Of an ELF header where its segments are told, how many bytes each takes and how many there are; of a segment its
#: kind, its place in the file and its length there (elf.h).
_HEADER, _SEGMENT, _PT_LOAD = struct.Struct("<32xQ14xHH"), struct.Struct("<I4xQ16xQ"), 1


def _cut_short(data: bytes) -> bool:
    """Whether a segment that would be mapped is not all there."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < _HEADER.size:
        return False  # not 64 bits and little-endian, or too short: the loader refuses it by itself
    start, size, number = _HEADER.unpack_from(data)
    for place in range(start, start + size * number, size or 1):
        if place + _SEGMENT.size > len(data):
            return True
        kind, offset, length = _SEGMENT.unpack_from(data, place)
        if kind == _PT_LOAD and offset + length > len(data):
            return True
    return False


def _status() -> dict[str, Any]:
    import ctxfix

    return ctxfix.status()


# ---- the command -----------------------------------------------------------------------------------------------------


def examine(around: Surroundings | None = None) -> list[Finding]:
    """Run every check. One that fails is a finding itself."""
    around = around or Surroundings()
    found: list[Finding] = []
    for check in _checks:
        try:
            found += check(around)
        except Exception as error:  # noqa: BLE001 - one broken file in /sys must not hide the other findings
            found.append(Finding(check.__name__, UNKNOWN, f"could not be checked: {type(error).__name__}: {error}"))
    return found


def main(as_json: bool) -> int:
    """Carry out the command; 1 if something is bad."""
    findings = examine()
    bad = sum(finding.state == BAD for finding in findings)
    if as_json:
        print(json.dumps({"bad": bad, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _print(findings)
    return 1 if bad else 0


def _print(findings: list[Finding]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ctxfix.console import console

    styles = {OK: "green", NOTE: "cyan", BAD: "red", UNKNOWN: "yellow"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("", "what", "found", "why it matters, and what to do"):
        table.add_column(head, no_wrap=head == "", overflow="fold")
    order = {BAD: 0, UNKNOWN: 1, NOTE: 2, OK: 3}
    for finding in sorted(findings, key=lambda f: order[f.state]):
        why = Text(finding.why)
        if finding.cure:
            why.append(f"{' ' if finding.why else ''}⇒ {finding.cure}", "bold")
        table.add_row(Text(finding.state, styles[finding.state]), Text(finding.check), Text(finding.what), why)
    console(160).print(table)
