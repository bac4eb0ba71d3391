# SPDX-License-Identifier: Apache-2.0
"""Show the fault of real NIXL, and ctxfix ending it: the table behind `make demo`.

Each mode of transfer.py runs with each NIXL version, with ctxfix switched off and on. The program is the
same; ctxfix comes from its start-up file in the environment of this interpreter. Exit status 0: without
ctxfix the fault shows; with it every post is made in its memory's context, and the caller's contexts are
what they were. 1: something is not so, each thing is named with its log. 2: the rig could not be prepared.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rig import VERSIONS, Outcome, Rig, RigError
from transfer import MODES

from ctxfix import native

GPU = 1  # of sender and receiver, in every row
# mode of transfer.py -> options; two modes of it are left to the tests, being about limits
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {mode: (mode, ()) for mode in MODES if mode not in ("mixed", "dram")}
ROWS["thread, forkserver"] = ("thread", ("--start-method", "forkserver"))

# Without ctxfix, 1.1.0 must show these, or the rig proves nothing.
FAULTS = {"thread": "none", "thread, forkserver": "none", "wrong-context": "wrong"}

# Here NIXL 1.4.0 chooses the context itself, inside the post: it trusts the application's devId, and it refuses memory
# that belongs to no context. Without ctxfix's C extension nobody outside can change that; nothing may become worse.
INSIDE_NIXL = {("wrong-devid", "1.4.0"), ("vmm", "1.4.0")}

LEGEND = """\
Posts: right, in the memory's own context; wrong, in another GPU's; none, in no
context at all. Behind the slash: in whose context NIXL's own threads run, the
receiver's copier among them. † The posting thread's context is left changed.
"""
NO_EXTENSION = """\
ctxfix's C extension is not there ({reason}):
NIXL's own threads are not bound, and NIXL 1.4.0's choices inside the post (*) stand.
"""


@dataclass
class Cell:
    """A row's outcome without and with ctxfix, for one version."""

    without: Outcome
    with_: Outcome
    complaints: list[str] = field(default_factory=list)


def judge(row: str, version: str, cell: Cell) -> None:
    """Write down what is not as it must be, each with the log that shows it."""

    def complain(what: str, outcome: Outcome) -> None:
        cell.complaints.append(f"{row}, NIXL {version}, {what} (log: {outcome.log})")

    without, fixed = cell.without, cell.with_
    if version == "1.1.0" and row in FAULTS and set(without.verdicts) != {FAULTS[row]}:
        said = describe_posts(without)
        complain(f"without ctxfix: the fault did not show, posts should be {FAULTS[row]!r}: {said}", without)
    if not fixed.context_kept:
        complain("with ctxfix: the caller's contexts are not what they were", fixed)
    if (row, version) in INSIDE_NIXL and not native.available():
        if (fixed.verdicts, fixed.done) != (without.verdicts, without.done) and not all_right(fixed):
            complain(f"with ctxfix: worse than without: {describe_posts(fixed)}", fixed)
        return
    if not without.done and (row, version) not in INSIDE_NIXL:
        complain(f"without ctxfix: {problem(without)}", without)
    if not fixed.done:
        complain(f"with ctxfix: {problem(fixed)}", fixed)
    elif not all_right(fixed):
        complain(f"with ctxfix: posts in the wrong context: {describe_posts(fixed)}", fixed)
    elif native.available() and fixed.progress_gpus != {GPU}:
        complain(f"with ctxfix: NIXL's own threads run on {describe_threads(fixed)}", fixed)


def all_right(outcome: Outcome) -> bool:
    return set(outcome.verdicts) == {"right"}


def problem(outcome: Outcome) -> str:
    result = outcome.result
    return str(result["error"] or (result["state"] if result["state"] != "DONE" else "the bytes are wrong"))


def describe_posts(outcome: Outcome) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(outcome.verdicts.items())) or "no post"


def describe_threads(outcome: Outcome) -> str:
    gpus = ("none" if gpu is None else f"GPU{gpu}" for gpu in outcome.progress_gpus)
    return ",".join(sorted(gpus)) or "none"


def show(outcome: Outcome) -> str:
    """Return a table cell: posts by verdict, where NIXL's own threads run, and what else went wrong."""
    colour = "green" if all_right(outcome) else "red"
    verdicts = ",".join(sorted(outcome.verdicts)) or "refused"
    changed = "" if outcome.context_kept else "[red]†[/]"
    threads = f"[{'green' if outcome.progress_gpus == {GPU} else 'red'}]{describe_threads(outcome)}[/]"
    return f"[{colour}]{verdicts}[/]{changed}/{threads}"


def run_all(rig: Rig, rows: list[str], versions: list[str], tick: Callable[[str], None]) -> dict[tuple[str, str], Cell]:
    cells = {}
    for row in rows:
        mode, options = ROWS[row]
        for version in versions:
            outcomes = []
            for name, extra in (("without", {"CTXFIX_DISABLE": "1"}), ("with", {})):
                tick(f"{row}, NIXL {version}, {name} ctxfix")
                log = f"demo-{row.replace(', ', '-')}-{version}-{name}"
                outcomes.append(rig.transfer(version, mode, *options, name=log, **extra))
            cells[row, version] = Cell(*outcomes)
            judge(row, version, cells[row, version])
    return cells


def draw(rows: list[str], versions: list[str], cells: dict[tuple[str, str], Cell]) -> Table:
    table = Table(title="In whose context are transfers posted / do NIXL's own threads run?")
    table.add_column("the application", no_wrap=True)
    for version in versions:
        table.add_column(f"{version}\nwithout", no_wrap=True)
        table.add_column(f"{version}\nwith ctxfix", no_wrap=True)
    for row in rows:
        inside = any((row, version) in INSIDE_NIXL for version in versions)
        mark = " *" if inside and not native.available() else ""
        pairs = [cells[row, version] for version in versions]
        table.add_row(f"{row}{mark}", *(show(o) for cell in pairs for o in (cell.without, cell.with_)))
    return table


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", choices=ROWS, help="only this row; may be repeated")
    parser.add_argument("--nixl", action="append", choices=VERSIONS, help="only this version; may be repeated")
    chosen = parser.parse_args(arguments)
    rows, versions = chosen.row or list(ROWS), chosen.nixl or list(VERSIONS)
    os.environ.pop("CTXFIX_DISABLE", None)  # a shell that has it set would show no cure

    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("preparing the rig", total=None)
        try:
            rig = Rig.prepare(versions, report=lambda step: progress.update(task, description=step))
        except RigError as error:
            progress.stop()
            console.print(f"The demo cannot run: {error}", style="red", markup=False)
            return 2
        progress.update(task, total=2 * len(rows) * len(versions))

        def tick(description: str) -> None:
            progress.update(task, description=description)
            progress.advance(task)

        cells = run_all(rig, rows, versions, tick)
        progress.update(task, description="done")

    console.print(draw(rows, versions, cells))
    console.print(LEGEND, markup=False, end="")
    if not native.available():
        console.print(NO_EXTENSION.format(reason=native.reason()), markup=False, end="")
    complaints = [complaint for cell in cells.values() for complaint in cell.complaints]
    for complaint in complaints:
        console.print(complaint, style="red", markup=False, soft_wrap=True)
    if not complaints:
        console.print("The fault shows without ctxfix, and ends with it.", style="green")
    return 1 if complaints else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
