# SPDX-License-Identifier: Apache-2.0
"""`ctxfix doctor`: each fault is found where it is, and only there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctxfix import cli
from ctxfix.verify import doctor
from ctxfix.verify.doctor import BAD, NOTE, OK, UNKNOWN, Library, Surroundings

GOOD_STATUS = {
    "active": True,
    "reason": "",
    "start_files": [{"path": "/site/ctxfix-init.pth", "runs": True, "reason": ""}],
    "targets": {},
    "settings": {"problems": []},
    "native": {"available": True, "reason": ""},
}


class Nvml:
    NVML_P2P_CAPS_INDEX_READ = (0,)  # as in nvidia-ml-py 13
    NVML_P2P_STATUS_OK = 0
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
    p2p, mig, mode, broken = 0, 0, 0, False

    def nvmlInit(self) -> None:
        if self.broken:
            raise RuntimeError("Driver Not Loaded")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, what: int) -> int:
        assert what == 0, "a plain int, as ctypes takes it"
        return self.p2p

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        return [self.mig, self.mig]

    def nvmlDeviceGetComputeMode(self, handle: int) -> int:
        return self.mode

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=80 << 30)


def shm(free: int, total: int = 64 << 30) -> Callable[[], Any]:
    return lambda: SimpleNamespace(f_bavail=free, f_blocks=total, f_frsize=1)


@pytest.fixture
def around(tmp_path: Path) -> Surroundings:
    """A machine with nothing wrong."""
    counters = tmp_path / "sys/class/infiniband/rdmap0/ports/1/hw_counters"
    counters.mkdir(parents=True)
    (counters / "rdma_write_bytes").write_text("0")
    return Surroundings(
        environ={"FI_LOG_LEVEL": "warn"},
        root=str(tmp_path),
        nvml=Nvml(),
        version_of=lambda name: "1.4.0" if name == "nixl-cu13" else None,
        libraries=lambda: [Library("/opt/amazon/efa/lib/libfabric.so.1", (2, 7), True)],
        status=lambda: GOOD_STATUS,
        shm=shm(32 << 30),
        host=lambda: (1 << 40, 4),
    )


def found(around: Surroundings) -> dict[str, str]:
    return {finding.check: finding.state for finding in doctor.examine(around)}


def test_a_good_machine(around: Surroundings) -> None:
    assert found(around) == {
        "start-up file": OK, "native part": OK, "/dev/shm": OK, "peer access": OK, "EFA": OK, "nixl-cu13": NOTE,
        "libfabric": OK,
    }  # fmt: skip


def set_environ(**variables: str) -> Callable[[Surroundings], None]:
    def fault(around: Surroundings) -> None:
        around.environ = {"FI_LOG_LEVEL": "warn", **variables}

    return fault


def set_status(**changes: Any) -> Callable[[Surroundings], None]:
    def fault(around: Surroundings) -> None:
        around.status = lambda: {**GOOD_STATUS, **changes}

    return fault


def set_nvml(**changes: Any) -> Callable[[Surroundings], None]:
    def fault(around: Surroundings) -> None:
        around.nvml = type("Changed", (Nvml,), changes)()

    return fault


def set_field(**changes: Any) -> Callable[[Surroundings], None]:
    def fault(around: Surroundings) -> None:
        vars(around).update(changes)

    return fault


def libraries(*given: Library) -> Callable[[Surroundings], None]:
    return set_field(libraries=lambda: list(given))


def nixl(version: str | None) -> Callable[[Surroundings], None]:
    return set_field(version_of=lambda name: version if name == "nixl-cu12" else None)


FAULTS: list[tuple[Callable[[Surroundings], None], str, str]] = [
    (set_environ(FI_LOG_PROV="efa"), "FI_LOG_PROV", BAD),
    (set_environ(FI_LOG_PROV="^shm"), "FI_LOG_PROV", BAD),
    (set_environ(FI_LOG_LEVEL=""), "FI_LOG_LEVEL", NOTE),
    (set_environ(FI_EFA_ENABLE_SHM_TRANSFER="0"), "FI_EFA_ENABLE_SHM_TRANSFER", NOTE),
    (set_environ(FI_HMEM="rocr"), "FI_HMEM", BAD),
    (set_environ(FI_HMEM_DISABLE_P2P="1"), "FI_HMEM_DISABLE_P2P", BAD),
    (set_environ(FI_HMEM_CUDA_ENABLE_XFER="0"), "FI_HMEM_CUDA_ENABLE_XFER", BAD),
    (set_environ(FI_HMEM_CUDA_USE_GDRCOPY="1"), "FI_HMEM_CUDA_USE_GDRCOPY", NOTE),
    (set_environ(FI_PROVIDER="tcp"), "FI_PROVIDER", NOTE),
    (
        set_environ(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:1,expandable_segments:True"),
        "PYTORCH_CUDA_ALLOC_CONF",
        BAD,
    ),
    (set_environ(PYTORCH_ALLOC_CONF="expandable_segments:true"), "PYTORCH_ALLOC_CONF", BAD),
    (set_environ(CUDA_VISIBLE_DEVICES=""), "CUDA_VISIBLE_DEVICES", BAD),
    (set_environ(CUDA_VISIBLE_DEVICES="3"), "CUDA_VISIBLE_DEVICES", NOTE),
    (set_environ(SGLANG_PLUGINS="other"), "SGLANG_PLUGINS", NOTE),
    (set_environ(KUBERNETES_SERVICE_HOST="10.0.0.1"), "container", NOTE),
    (set_status(active=False, reason="CTXFIX_DISABLE=1"), "ctxfix", BAD),
    (set_status(start_files=[]), "start-up file", BAD),
    (
        set_status(start_files=[{"path": "/t/x.pth", "runs": False, "reason": "no site directory"}]),
        "start-up file",
        BAD,
    ),
    (set_status(native={"available": False, "reason": "not built"}), "native part", BAD),
    (set_status(settings={"problems": ["CTXFIX_LOG='x'"]}), "settings", BAD),
    (set_status(targets={"nixl_cu12._api": {"state": "failed", "reason": "r"}}), "nixl_cu12._api", BAD),
    (set_nvml(p2p=1), "peer access", BAD),
    (set_nvml(mig=1), "GPU 0", BAD),
    (set_nvml(mode=3), "GPU 1", BAD),
    (set_nvml(broken=True), "GPUs", UNKNOWN),
    (set_nvml(nvmlDeviceGetP2PStatus=None), "GPUs", UNKNOWN),
    (set_field(host=lambda: (256 << 30, 32)), "FI_MR_CACHE_MAX_SIZE", NOTE),
    (set_environ(FI_MR_CACHE_MAX_SIZE=str(8 << 30)), "FI_MR_CACHE_MAX_SIZE", NOTE),
    (set_field(shm=shm(10 << 20)), "/dev/shm", BAD),
    (set_field(shm=shm(60 << 20, 64 << 20)), "/dev/shm", BAD),
    (set_field(shm=shm(500 << 20)), "/dev/shm", NOTE),
    (set_field(root="/nowhere"), "EFA", NOTE),
    (nixl("1.1.0"), "nixl-cu12", BAD),
    (nixl("1.3.2"), "nixl-cu12", BAD),
    (nixl("1.3.1"), "nixl-cu12", NOTE),
    (nixl("9.9"), "nixl-cu12", NOTE),
    (nixl(None), "NIXL", UNKNOWN),
    (libraries(), "libfabric", BAD),
    (libraries(Library("/a", (1, 17), True)), "libfabric", BAD),
    (libraries(Library("/a", (2, 4), False)), "libfabric", BAD),
    (libraries(Library("/a", (2, 6), True)), "libfabric", NOTE),
    (libraries(Library("/a", None, True, "it is cut short")), "libfabric", BAD),
    (libraries(Library("/a", (2, 7), True), Library("/b", None, False)), "several libfabrics", NOTE),
]


@pytest.mark.parametrize(
    ("fault", "check", "state"), FAULTS, ids=[f"{c}-{s}-{i}" for i, (_, c, s) in enumerate(FAULTS)]
)
def test_each_fault_is_found(
    around: Surroundings, fault: Callable[[Surroundings], None], check: str, state: str
) -> None:
    before = found(around)
    fault(around)
    after = found(around)
    assert after.get(check) == state
    assert before.get(check) != state
    for finding in doctor.examine(around):
        assert finding.what
        if finding.state == BAD and finding.check != "settings":
            assert finding.why or finding.cure


def test_the_cache_of_mappings_is_large_enough_when_it_holds_a_gpu(around: Surroundings) -> None:
    around.host = lambda: (256 << 30, 32)
    (finding,) = [finding for finding in doctor.examine(around) if finding.check == "FI_MR_CACHE_MAX_SIZE"]
    assert "4.0 GiB" in finding.what and finding.cure == f"FI_MR_CACHE_MAX_SIZE={80 << 30}"
    for value, seen in ((finding.cure.partition("=")[2], False), ("0", True), ("lots", True), ("²", True)):
        around.environ = {"FI_LOG_LEVEL": "warn", "FI_MR_CACHE_MAX_SIZE": value}
        assert ("FI_MR_CACHE_MAX_SIZE" in found(around)) is seen, value


def test_no_dev_shm(around: Surroundings) -> None:
    def missing() -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    around.shm = missing
    assert found(around)["/dev/shm"] == BAD


def test_a_check_that_breaks_hides_no_other(around: Surroundings) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("x")

    around.libraries = broken
    states = found(around)
    assert states["libfabric"] == UNKNOWN
    assert states["peer access"] == OK


def test_libraries_are_found_once_and_in_order(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "libfabric.so.1.2").write_bytes(b"\x7fELF cudaIpcGetMemHandle" if name == "b" else b"")
        (tmp_path / name / "libfabric.so.1").symlink_to("libfabric.so.1.2")
    (tmp_path / "c").symlink_to(tmp_path / "b")
    path = f"{tmp_path}/b:{tmp_path}/c"
    result = doctor.find_libraries({"LD_LIBRARY_PATH": path}, (str(tmp_path / "a"),))
    assert [(Path(library.path).parent.name, library.cuda, library.version) for library in result] == [
        ("b", True, None), ("a", False, None)
    ]  # fmt: skip


def of_code(code: str) -> Callable[[Path], None]:
    """A libfabric made by the C compiler that there is."""

    def make(path: Path) -> None:
        if not shutil.which("cc"):
            pytest.skip("no C compiler")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", path, "-x", "c", "-"], input=code.encode(), check=True)

    return make


def cut(path: Path) -> None:
    of_code("char large[1 << 20] = {1}; int fi_version() { return 2 << 16 | large[9]; }")(path)
    os.truncate(path, os.path.getsize(path) // 2)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (cut, "it is cut short"),
        (lambda path: path.write_bytes(b"\x7fELF\2\1".ljust(64, b"\xff")), "it is cut short"),
        (lambda path: path.write_bytes(b"garbage" * 99), "invalid ELF header"),
        (lambda path: path.write_bytes(b""), "file too short"),
        (Path.mkdir, "it is no file"),
        (os.mkfifo, "it is no file"),
        (lambda path: path.symlink_to("nowhere"), "No such file or directory"),
    ],
    ids=["cut", "header", "garbage", "empty", "folder", "fifo", "link"],
)
def test_a_libfabric_that_cannot_be_loaded_is_told(
    around: Surroundings, make: Callable[[Path], None], told: str, tmp_path: Path
) -> None:
    library = tmp_path / "libfabric.so.1"
    make(library)
    around.libraries = lambda: doctor.find_libraries({"LD_LIBRARY_PATH": str(tmp_path)}, ("/nowhere",))
    (finding,) = [finding for finding in doctor.examine(around) if finding.check == "libfabric"]
    assert (finding.state, finding.what) == (BAD, f"{library} cannot be loaded: {told}")


def test_a_libfabric_that_is_whole_tells_its_version(tmp_path: Path) -> None:
    of_code("int fi_version() { return 2 << 16 | 4; }")(tmp_path / "libfabric.so.1")
    (library,) = doctor.find_libraries({"LD_LIBRARY_PATH": str(tmp_path)}, ("/nowhere",))
    assert library == Library(str(tmp_path / "libfabric.so.1"), (2, 4), False)


def test_a_nixl_without_metadata_is_as_installed_as_status_says(around: Surroundings) -> None:
    target = {"version": None, "state": "pending", "reason": ""}
    around.version_of = lambda name: None
    around.status = lambda: {**GOOD_STATUS, "targets": {"nixl_cu12._api": target}}
    states = found(around)
    assert (states.get("nixl-cu12"), states.get("NIXL")) == (NOTE, None)
    target["state"] = "not installed"
    assert found(around)["NIXL"] == UNKNOWN


@pytest.mark.parametrize(("state", "code"), [(OK, 0), (NOTE, 0), (UNKNOWN, 0), (BAD, 1)])
def test_the_exit_code(state: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: [doctor.Finding("one", OK, "-"), doctor.Finding("two", state, "-")])
    assert cli.main(["doctor"]) == cli.main(["doctor", "--json"]) == code


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (1 if report["bad"] else 0)
    assert {"check", "state", "what", "why", "cure"} == set(report["findings"][0])
    assert cli.main(["doctor"]) == code
