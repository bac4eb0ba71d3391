# SPDX-License-Identifier: Apache-2.0
"""`ctxfix verify`: its shapes, plan and environment. Whole runs are in integration/rig and integration/gpu."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import environments
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctxfix import cli
from ctxfix.errors import VerifyError
from ctxfix.verify import gpu, run, shapes

PLAN = run.Plan([0, 1], 2, "t", 4, "nixl_cu12", "LIBFABRIC", 1 << 20, 64, 1, 60, None, False)


def test_a_request_is_that_of_deepseek_v2_lite() -> None:
    shape = shapes.request(8192)
    assert shape.bytes == 27 * 576 * 2 * 8192 == 254_803_968
    assert len(shape.pieces) == 27 * 12
    assert {piece.size for piece in shapes.scattered(8192).pieces} == {1152}


@given(st.integers(1 << 15, 1 << 24), st.integers(2, 300))
def test_pieces_never_overlap_and_most_change_places(size: int, tokens: int) -> None:
    for shape in shapes.all_of(size, tokens):
        for side in ("source", "target"):
            end = 0
            for start, length in sorted((getattr(piece, side), piece.size) for piece in shape.pieces):
                assert start >= end
                end = start + length
            assert end <= shape.extent
        assert shape.bytes > 0


def test_every_place_and_transfer_has_bytes_of_its_own() -> None:
    pattern = gpu.Pattern(1)
    places = {pattern.at(offset, transfer) for offset in range(0, 1 << 26, 1 << 20) for transfer in range(20)}
    assert len(places) == 64 * 20
    assert gpu.Pattern(1)._bytes.raw == pattern._bytes.raw != gpu.Pattern(2)._bytes.raw


@pytest.mark.parametrize(
    ("gpus", "cross", "seats"),
    [
        (4, False, [(0, 2), (1, 3)]),
        (2, False, [(0, 0), (1, 1)]),
        (2, True, [(0, 1), (1, 0)]),
        (1, False, [(0, 0), (0, 0)]),
        (3, True, [(0, 1), (1, 2)]),
    ],
)
def test_who_sits_where(gpus: int, cross: bool, seats: list[tuple[int, int]]) -> None:
    plan = replace(PLAN, gpus=gpus, cross=cross)
    assert [(plan.gpu_of("prefill", rank), plan.gpu_of("decode", rank)) for rank in (0, 1)] == seats
    assert ("some share" in plan.seating()) == (gpus < 4)


def test_what_the_shell_filters_does_not_hide_libfabric_s_words() -> None:
    before = {"FI_LOG_PROV": "efa", "FI_LOG_SUBSYS": "av", "PATH": "/bin", "LD_PRELOAD": "/a.so", "PYTHONPATH": "/p"}
    after = run.environment(before, "/records", True, "/fabric.so")
    assert not {"FI_LOG_PROV", "FI_LOG_SUBSYS"} & set(after)
    assert (after["FI_LOG_LEVEL"], after["CTXFIX_DISABLE"], after["CTXFIX_RECORD"]) == ("warn", "1", "/records")
    assert after["LD_PRELOAD"] == "/fabric.so:/a.so"
    assert after["PYTHONPATH"] == "/p"
    assert run.environment({"FI_LOG_LEVEL": "info"}, "/r", False, None)["FI_LOG_LEVEL"] == "info"


def options(**changes: Any) -> argparse.Namespace:
    given = {"tp": None, "backend": "LIBFABRIC", "size": 1 << 20, "tokens": 64, "repeat": 1, "module": "fakenixl"}
    return argparse.Namespace(**{**given, "timeout": 60, "loopback": None, "cross": False, "record": None,
                                 "without_cupti": False, **changes})  # fmt: skip


@pytest.fixture
def four_gpus(package: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a NIXL, as far as a plan looks at it."""
    package("fakenixl._api", "")
    monkeypatch.setattr(run.gpu, "count", lambda: 4)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("four_gpus")
def test_a_plan_from_a_launcher_s_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.make_plan(options()).ranks == [0, 1]
    assert run.make_plan(options(tp=3)).ranks == [0, 1, 2]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")  # a launcher of one is none
    assert run.make_plan(options()).ranks == [0, 1]
    monkeypatch.setenv("WORLD_SIZE", "4")
    plan = run.make_plan(options())
    assert (plan.ranks, plan.world, plan.rank_source) == ([1], 4, "torch environment")
    with pytest.raises(VerifyError, match="4 ranks"):
        run.make_plan(options(tp=2))


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    "wrong",
    [
        *({"tp": value} for value in (-1, 0, 10**23)),
        *({"size": value} for value in (100, 10**23)),
        *({"tokens": value} for value in (1, 10**23)),
        *({"repeat": value} for value in (0, 10**23)),
        *({"timeout": value} for value in (float("nan"), float("inf"), 0, -1)),
        *({"module": name} for name in ("../x", ".", "", "__main__", "os", "json", "a.b", "no_such_nixl")),
        {"loopback": "/nowhere.so"},
    ],
    ids=str,
)
def test_what_cannot_be_run_is_refused(wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    ((name, value),) = wrong.items()
    assert run.main(options(**wrong)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    expected = {
        "module": f"NIXL is not installed here (no module {value} with NIXL's _api in it): pip install nixl",
        "loopback": "/nowhere.so: there is no such library",
    }
    told = line.removeprefix("ctxfix verify: ")
    assert told == expected.get(name, told) and (name in expected or told.startswith(f"--{name} must be from "))


@pytest.mark.usefixtures("four_gpus")
def test_a_folder_of_another_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "old").touch()
    assert run.main(options(record=str(tmp_path))) == 2
    assert "is not empty" in capsys.readouterr().err


def test_without_nixl_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--module", "no_such_nixl"]) == 2
    assert "NIXL is not installed here (no module no_such_nixl" in capsys.readouterr().err


def test_a_rank_that_breaks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(run, "_run_pair", broken)
    assert run.run_once(PLAN, str(tmp_path), False, True, {}) == ["ranks 0, 1: ZeroDivisionError: of ours"]


#: As soon as all processes are there, on whatever line the main thread is. A program of its own: what other tests have
#: loaded (libfabric's shm provider) may have set handlers of its own.
_CTRL_C = """
import signal, sys, threading
from ctxfix import cli
from ctxfix.verify import run
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
started = []
class Process(run.Process):
    def __init__(self, *given):
        super().__init__(*given)
        started.append(self._process)
        if len(started) == 4:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
run._WORKER, run.Process, run.gpu.count = "import time; time.sleep(600)", Process, lambda: 4
code = cli.main(["verify", "--module", "fakenixl", "--tokens", "64"])
print([process.returncode for process in started])
sys.exit(code)
"""


def test_ctrl_c_ends_the_processes_and_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "fakenixl").mkdir()
    (tmp_path / "fakenixl" / "_api.py").touch()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = environments.run([sys.executable, "-c", _CTRL_C], PYTHONPATH=str(tmp_path), TMPDIR=str(temporary))
    assert done.returncode == 130, done.stderr
    assert done.stdout.splitlines()[-1] == str([-signal.SIGKILL.value] * 4)
    (folder,) = temporary.iterdir()
    assert done.stderr.splitlines()[-2:] == [  # before, the bars
        f"ctxfix verify: the records and logs of the processes are in {folder}",
        "ctxfix: interrupted",
    ]
