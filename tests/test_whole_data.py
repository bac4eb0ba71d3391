# SPDX-License-Identifier: Apache-2.0
"""whole_data.py: when registered memory is marked for synchronous operations, and what happens where it cannot be."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from fake_cuda import FakeCuda

from ctxfix import counters, settings, whole_data
from ctxfix.native import agents, available

SYNC_MEMOPS = 6


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch):
    def choose(sync_memops: str = "auto", libfabric: str | None = None, calls_are_whole: bool = False) -> None:
        monkeypatch.setattr(settings, "current", lambda: settings.Settings(sync_memops=sync_memops))
        monkeypatch.setattr(whole_data, "loaded_libfabric", lambda: libfabric)
        monkeypatch.setattr(agents, "calls_are_whole", lambda: calls_are_whole)
        whole_data.copies_by_event.cache_clear()

    return choose


@pytest.fixture
def libfabrics(tmp_path: Path) -> dict[str, str]:
    """Files that look up what libfabric 2.6.0 and its successor do."""
    names = {"2.6.0": b"\0cudaMemcpy\0cuMemcpyDtoDAsync\0", "head": b"\0cudaMemcpy\0cudaMemcpyAsync\0"}
    for version, content in names.items():
        (tmp_path / version).write_bytes(b"\x7fELF" + content)
    return {version: str(tmp_path / version) for version in names}


def test_explicit_choices(choose, libfabrics) -> None:
    choose("always")
    assert whole_data.needed()
    choose("never", libfabrics["2.6.0"])
    assert not whole_data.needed()


def test_auto_goes_by_the_libfabric_in_the_process(choose, libfabrics) -> None:
    for library, needed in ((None, False), (libfabrics["2.6.0"], True), (libfabrics["head"], False)):
        choose("auto", library)
        assert whole_data.needed() is needed, library


def test_auto_leaves_it_to_the_extension_where_that_makes_the_copies(choose, libfabrics) -> None:
    choose("auto", libfabrics["2.6.0"], calls_are_whole=True)
    assert not whole_data.needed()


def test_a_libfabric_that_cannot_be_read_is_not_trusted(choose, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for library in (str(tmp_path / "missing"), str(tmp_path / "empty"), str(tmp_path)):
        choose("auto", library)
        assert whole_data.needed()


@pytest.mark.skipif(not available(), reason="the extension is not built: it tells what is loaded")
def test_what_is_loaded_is_read_again_only_when_something_has_been_loaded(tmp_path: Path) -> None:
    source, library = tmp_path / "fabric.c", tmp_path / "libfabric.so.1"
    source.write_text("#include <dlfcn.h>\nvoid *look(const char *name) { return dlsym(RTLD_DEFAULT, name); }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True, timeout=60)
    code = f"""
        import ctypes
        from ctxfix import whole_data
        looks, look = [], whole_data._look
        whole_data._look = lambda: looks.append(look()) or looks[-1]
        assert whole_data.loaded_libfabric() is None and whole_data.loaded_libfabric() is None
        assert looks == [None], looks
        ctypes.CDLL({str(library)!r})
        assert whole_data.loaded_libfabric() == whole_data.loaded_libfabric() == {str(library)!r}
        assert len(looks) == 2, looks
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("line", "path"),
    [
        ("7f00-7f01 r-xp 0 0:0 1   /opt/efa/lib/libfabric.so.1.30.0", "/opt/efa/lib/libfabric.so.1.30.0"),
        ("7f00-7f01 r-xp 0 0:0 1   /a b/libfabric-1a2b3c.so.1.2", "/a b/libfabric-1a2b3c.so.1.2"),
        ("7f00-7f01 r-xp 0 0:0 1   /usr/lib/libfabric_helper.so", None),
        ("7f00-7f01 r-xp 0 0:0 1   /usr/lib/libplugin_LIBFABRIC.so", None),
        ("7f00-7f01 rw-p 0 0:0 0", None),
    ],
)
def test_which_libfabric_is_loaded(line: str, path: str | None) -> None:
    assert whole_data.libfabric_in([f"{line}\n"]) == path


def test_memory_is_marked(cuda: FakeCuda, choose) -> None:
    choose("always")
    address = cuda.alloc(1)
    assert cuda.attribute(SYNC_MEMOPS, address) == 0
    whole_data.apply(address)
    assert cuda.attribute(SYNC_MEMOPS, address) == 1


def test_memory_is_left_alone_where_it_need_not_be(cuda: FakeCuda, choose) -> None:
    choose("never")
    address = cuda.alloc(1)
    whole_data.apply(address)
    assert cuda.attribute(SYNC_MEMOPS, address) == 0


def test_vmm_memory_refuses_with_one_warning(cuda: FakeCuda, choose, caplog) -> None:
    choose("always")
    before = counters.snapshot()["unsynchronised_ranges"]
    for _ in range(2):
        whole_data.apply(cuda.alloc_vmm(1))
    assert counters.snapshot()["unsynchronised_ranges"] - before == 2
    assert len(caplog.records) == 1 and "expandable_segments:False" in caplog.text
