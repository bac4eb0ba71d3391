# SPDX-License-Identifier: Apache-2.0
"""What a test may ask of what was recorded while it ran: the fixture ``ctxfix_recorder``."""

from __future__ import annotations

import os
from typing import Any

from ctxfix.errors import EvidenceError
from ctxfix.evidence import merge, records
from ctxfix.evidence.recorder import Recorder
from ctxfix.verify.verdict import Judgement, Path, judge


class Recording:
    """The records of a test: of its own process, and of all it started."""

    def __init__(self, folder: str, recorder: Recorder) -> None:
        self.folder = folder
        self._recorder = recorder

    def environment(self) -> dict[str, str]:
        """The environment for child processes that are not given this one's."""
        return {**os.environ, "CTXFIX_RECORD": self.folder}

    def compared(self, sender: str, receiver: str, transfers: int, size: int, wrong: int = 0, stale: int = 0) -> None:
        """Say that the test compared bytes that agent ``sender`` wrote to agent ``receiver``.

        Args:
            sender: the name of the NIXL agent that wrote.
            receiver: the name of the agent whose memory was written.
            transfers: how many transfers were compared.
            size: bytes of all of them.
            wrong: transfers that brought other bytes.
            stale: transfers that were announced before their bytes were there.
        """
        self._recorder.check(
            sender=sender, receiver=receiver, transfers=transfers, bytes=size, wrong=wrong, stale=stale
        )

    def run(self) -> merge.Run:
        """The evidence up to now. Children must have ended, or be silent for a second."""
        self._recorder.snapshot(final=True)
        run = merge.read(self.folder)
        # The test's own process may only have looked on.
        run.processes = [p for p in run.processes if p.agents or p.pid != os.getpid()]
        return run

    def judge(self, ranks: int | None = None, compared: bool = False) -> Judgement:
        """The verdict up to now. Children must have ended, or be silent for a second.

        Args:
            ranks: how many ranks must have posted; None: as many as the processes say. If these speak of more, the
                others must have left a record.
            compared: whether bytes must have been compared through :meth:`compared`, too.

        Raises:
            EvidenceError: nothing was recorded, or ``ranks`` is less than 1.
        """
        return judge(self.run(), ranks, compared)

    def rows(self, ranks: int | None = None) -> list[dict[str, Any]]:
        """For the summary: a plain row for each direction; empty if there is nothing to judge."""
        try:
            judgement = self.judge(ranks)
        except EvidenceError:
            return []
        return [
            {"name": row.name, "path": row.path.value, "good": row.good, "bytes": row.bytes, "posts": row.posts,
             "failures": row.failures, "mean_ms": row.mean_ms}
            for row in judgement.rows
            if row.posts or ranks is not None
        ]  # fmt: skip

    # ---- assertions --------------------------------------------------------------------------------------------------

    def assert_cuda_ipc(self, ranks: int | None = None, compared: bool = False) -> None:
        """Every direction of every rank went by CUDA IPC, and that is proven. Arguments as of :meth:`judge`.

        Raises:
            AssertionError: one is not; the message has the verdict of each, the reasons and what to do.
        """
        judgement = self.judge(ranks, compared)
        bad = [row for row in judgement.rows if row.path is not Path.CUDA_IPC]
        if bad or judgement.code:
            raise AssertionError(_tell("not every rank is proven to use CUDA IPC", judgement))

    def assert_no_sar(self) -> None:
        """Nothing went through host memory, and that is proven: what is not proven to take a good path fails, too."""
        judgement = self.judge()
        if not judgement.rows or any(not row.good for row in judgement.rows):
            raise AssertionError(_tell("some transfers went through host memory, or may have", judgement))

    def assert_no_stray_contexts(self) -> None:
        """No process has a CUDA context on a GPU of which it registered no memory."""
        for process in self._processes():
            if process.stray is None:
                raise AssertionError(f"{process.file}: its contexts are unknown")
            if process.stray:
                raise AssertionError(
                    f"{process.file} (rank {process.identity.rank}) has a context on GPU {process.stray}, "
                    f"and memory on {process.owners}"
                )

    def assert_contexts_restored(self) -> None:
        """Each context that ctxfix made current for a call was put back after it, and no hook failed."""
        for process in self._processes():
            counts = process.counters
            if not counts:
                raise AssertionError(f"{process.file}: ctxfix was off in it")
            made, back, failed = (counts.get(name, 0) for name in ("rebinds", "restores", "hook_failures"))
            if failed or back < made:
                raise AssertionError(
                    f"{process.file}: {made} contexts were made current, {back} put back, {failed} hooks failed"
                )

    def _processes(self) -> list[merge.Process]:
        processes = [process for process in self.run().processes if process.agents]
        if not processes:
            raise AssertionError(f"nothing was recorded: no process made an agent (*{records.SUFFIX} in {self.folder})")
        return processes


def _tell(what: str, judgement: Judgement) -> str:
    lines = [f"{what}: {judgement.reason}"]
    for row in judgement.rows:
        lines.append(f"{row.name}: {row.path.value}, {row.bytes:,} bytes in {row.posts} posts, {row.failures} failures")
        lines += [f"    {reason}" for reason in (() if row.good else row.reasons)]
        lines += [f"    => {cure}" for cure in (() if row.good else row.advice)]
    return "\n".join([*lines, *judgement.problems])
