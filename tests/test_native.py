# SPDX-License-Identifier: Apache-2.0
"""The C extension, against a stub driver and a stand-in libfabric: each case in a process of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from native_stub import CC, RIG, SOURCES, compile_c, environment

from ctxfix import native

pytestmark = [
    pytest.mark.skipif(not native.available(), reason=f"ctxfix.native: {native.reason()}"),
    pytest.mark.skipif(CC is None, reason="no C compiler"),
]


CASES = [
    ("threads_of_an_armed_thread_inherit", "lazy"),
    ("threads_of_an_armed_thread_inherit", "now"),
    ("attributes_exit_values_and_cancellation_pass",),
    ("a_thread_that_cannot_be_made",),
    ("groups_are_bound_late_and_again",),
    ("a_destroyed_context_leaves_the_thread_alone",),
    ("a_plugin_loaded_while_armed_is_covered",),
    ("nothing_is_loaded_or_initialised_without_cuda",),
    ("everything_is_put_back", "lazy"),
    ("everything_is_put_back", "now"),
    ("a_slot_taken_over_is_left",),
    ("another_interposer_stays_in_the_line",),
    ("forbidden_mprotect_breaks_nothing",),
    ("a_forked_child_is_off_until_it_arms",),
    ("a_forked_child_counts_from_zero",),
    ("calls_are_made_in_the_owners_context", "libfabric.so.1"),
    ("calls_are_made_in_the_owners_context", "libfabric-linked.so.1"),
    ("a_libfabric_in_use_before_us_is_adopted",),
    ("host_calls_on_a_bare_thread_make_no_stray_context",),
    ("a_probe_for_peer_to_peer_makes_no_context",),
    ("whole_copies",),
    ("a_mapping_is_opened_where_it_is_copied_into",),
    ("a_mapping_closed_while_off_is_forgotten",),
    ("streams_and_events_are_at_home_everywhere",),
    ("unknown_stream_calls_switch_the_stand_ins_off",),
    ("dlsym_sees_its_true_caller", "True"),
    ("dlsym_sees_its_true_caller", ""),
    ("nixl_cannot_leave_a_held_context",),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_case(rig: Path, case: tuple[str, ...]) -> None:
    """What each case guards is said in native_rig/cases.py."""
    command = [sys.executable, "-X", "faulthandler", str(RIG / "cases.py"), *case]
    result = subprocess.run(command, env=environment(rig), capture_output=True, text=True, timeout=30)
    assert result.returncode == 0 and result.stdout.endswith("END\n"), result.stdout + result.stderr


# ---- many threads under a checker ------------------------------------------------------------------------------------


def harness(rig: Path, name: str, *flags: str) -> Path:
    starter = compile_c(rig / f"libstarter-{name}.so", *flags, "-shared", "-fPIC", RIG / "starter.c", "-lpthread")
    sources = [SOURCES / f"{part}.c" for part in ("driver", "fabric", "slots", "threads")]
    return compile_c(
        rig / f"harness-{name}", *flags, f"-I{SOURCES}", RIG / "harness.c", *sources, starter, rig / "libcuda.so.1",
        f"-Wl,-rpath,{rig}", "-ldl", "-lpthread", "-O2",
    )  # fmt: skip


def test_thousands_of_threads_under_valgrind(rig: Path) -> None:
    """No leak and no bad access of ours. (Races are ThreadSanitizer's: helgrind does not know C11 atomics.)"""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip("valgrind is not installed")
    options = [
        "--quiet",
        "--fair-sched=yes",
        "--error-exitcode=9",
        "--leak-check=full",
        "--errors-for-leak-kinds=definite",
    ]
    command = [valgrind, *options, harness(rig, "memcheck"), "3000"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "right 3000 wrong 0 created 3000 late 1" in result.stdout


def test_ten_thousand_threads_with_thread_sanitizer(rig: Path) -> None:
    """The sanitizer's own pthread_create stays in the line, and it sees no race."""
    try:
        program = harness(rig, "tsan", "-fsanitize=thread")
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no ThreadSanitizer")
    prefix = [shutil.which("setarch") or "setarch", "-R"] if shutil.which("setarch") else []
    result = subprocess.run([*prefix, program, "10000"], capture_output=True, text=True, timeout=110)
    assert result.returncode == 0 and "WARNING" not in result.stderr, result.stdout + result.stderr
