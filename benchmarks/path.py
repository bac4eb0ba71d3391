# SPDX-License-Identifier: Apache-2.0
"""How long a transfer takes, by size, pieces and route: NIXL as shipped, the one-line fix, ctxfix, UCX, a plain copy.

    python benchmarks/path.py --pair NIXL:LIBFABRIC … --libraries FOLDER --out path.json
    python benchmarks/path.py --draw path.json          # time over size and over pieces, as PNG and SVG

All contenders of a route are alive at once and take turns, a few transfers each, so none has the warmer machine; who
is not at work is stopped (SIGSTOP). In each turn the bytes of one transfer more are looked at when it is notified; and
once for each number of pieces those of some that have large pieces at their end, whose copies still run when all others
are through. A contender whose bytes are not there by then said done too early: it is marked, and never counted as the
fastest. A contender that fails, or does not end a transfer, is told of and left out from there on.

Needs two NVIDIA GPUs with peer access, torch and a C compiler; --draw needs matplotlib. --pair is as in
integration/gpu/run.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "integration" / "gpu"))

from run import Bench, machine, version_of  # noqa: E402

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SMALLEST = 4 * KIB  # bytes of a piece
BLOCKS = 2  # turns of each contender in each cell
LOOKS = 8  # at transfers that end late
SLOW = 200.0  # ms: contenders slower than this get no second turn
TARGET = 0.03  # how much longer than the best peer a transfer may take
START_S, TRANSFER_S = 60.0, 6.0  # limits: for the first answer of a process, for a transfer

Cell = tuple[int, int]  # bytes, pieces


class Contender(NamedTuple):
    name: str
    bench: Bench | None  # None: a plain copy
    ctxfix: bool = False
    choose: bool = False
    backend: str = "LIBFABRIC"


class Gone(RuntimeError):
    """A process ended, or did not answer in time."""


class End:
    """A process that is told what to do, and stopped meanwhile."""

    def __init__(self, arguments: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "path_end.py"), json.dumps(arguments)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._said: Queue[str] = Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                self._said.put(line)
        self._said.put("")

    def hear(self, limit_s: float) -> dict[str, Any]:
        try:
            line = self._said.get(timeout=limit_s)
        except Empty:
            line = ""
        if not line:
            raise Gone(self._log.read_text(errors="replace").strip()[-600:] or "no answer")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Gone(answer["error"])
        return answer

    def tell(self, **order: Any) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise Gone(str(error)) from error

    def signal(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()


class Runner:
    """A contender on one route: its processes, and what they measured."""

    def __init__(self, contender: Contender, route: tuple[int, int], a: argparse.Namespace, folder: Path) -> None:
        self.name, self.failure = contender.name, ""
        self.cells: dict[Cell, dict[str, Any]] = {}
        self._waits: dict[int, bool] = {}  # by pieces: whether all bytes are there when a transfer is notified
        self._largest = min(a.largest, GIB)  # a message of 2 GiB never ends: see cells
        source, target = route
        common = {"size": a.largest, "memory": a.memory, "backend": contender.backend, "choose": contender.choose}
        environment = dict(os.environ)
        if contender.bench is not None:
            environment = contender.bench.environment(contender.ctxfix, folder / "counts")
            environment.pop("FABRIC_COUNTS")
            if contender.backend != "LIBFABRIC":
                environment.pop("LD_PRELOAD")
        log = f"{contender.name}-{source}{target}".replace(" ", "_").replace("/", "_")
        self._gpu = target
        self._receiver: End | None = None
        if contender.bench is None:
            roles = {"role": "plain", "gpu": source, "other": target}
        else:
            roles = {"role": "send", "gpu": source}
            self._receiver = End({**common, "role": "receive", "gpu": target}, environment, folder / f"{log}.receiver")
        self._sender = End({**common, **roles}, environment, folder / f"{log}.sender")
        self._ends = [end for end in (self._sender, self._receiver) if end is not None]

    def begin(self, until: float) -> None:
        try:
            self._sender.hear(left(until, START_S))
            if self._receiver is not None:
                peer = self._receiver.hear(left(until, START_S))
                self._sender.tell(metadata=peer["metadata"], address=peer["address"], gpu=self._gpu)
                self._sender.hear(left(until, START_S))
                # The handshake of NIXL's libfabric plugin ends on its own thread: nobody is stopped before that.
                limit_s = left(until, TRANSFER_S)
                self._watch({"bytes": 2 * SMALLEST, "count": 1, "rounds": 1, "seconds": 0, "limit_s": limit_s})
        except Gone as error:
            self.failure = f"did not start: {error}"

    def beaten(self, cell: Cell) -> bool:
        """Whether there is nothing more to ask of it in this cell: it failed, or is slow and had its turn."""
        times = self.cells.get(cell, {}).get("ms")
        return bool(self.failure or (times and min(times) > SLOW))

    def _watch(self, order: dict[str, Any]) -> tuple[bool, bool]:
        """One transfer: whether its bytes were there when it was notified, and whether they were right in the end."""
        assert self._receiver is not None
        self._receiver.tell(bytes=order["bytes"], limit_s=order["limit_s"])
        self._receiver.hear(order["limit_s"])
        self._sender.tell(**{**order, "rounds": 1}, watch=True)
        seen = self._receiver.hear(2 * order["limit_s"])
        wanted = self._sender.hear(2 * order["limit_s"])
        return seen["told"] and seen["at_once"] == wanted["at_once"], seen["later"] == wanted["later"]

    def turn(self, cell: Cell, rounds: int, seconds: float, limit_s: float) -> None:
        if self.beaten(cell):
            return
        row = self.cells.setdefault(cell, {"ms": []})
        order = {"bytes": cell[0], "count": cell[1], "rounds": rounds, "seconds": seconds, "limit_s": limit_s}
        self._all(signal.SIGCONT)
        try:
            self._sender.tell(**order, watch=False)
            row["ms"] += self._sender.hear(2 * limit_s + seconds)["ms"]
            slow = min(row["ms"]) > SLOW
            if self._receiver is not None:
                looks = [self._watch(order)]
                if cell[1] not in self._waits:
                    late = {**order, "bytes": self._largest, "late": True}
                    looks += [self._watch(late) for _ in range(1 if slow else LOOKS)]
                    self._waits[cell[1]] = all(whole for whole, _ in looks)
                row["whole"] = row.get("whole", self._waits[cell[1]]) and looks[0][0]
                row["right"] = row.get("right", True) and all(right for _, right in looks)
        except Gone as error:
            self.failure = f"failed at {cell[0]} bytes in {cell[1]}: {error}"
        finally:
            self._all(signal.SIGSTOP)

    def _all(self, number: int) -> None:
        for end in self._ends:
            end.signal(number)

    def stop(self) -> None:
        self._all(signal.SIGSTOP)

    def end(self) -> None:
        for end in self._ends:
            end.end()


def left(until: float, limit_s: float) -> float:
    """Seconds: ``limit_s``, or what is left until a moment of time.monotonic(), but one at least."""
    return max(1.0, min(limit_s, until - time.monotonic()))


def cells(smallest: int, largest: int, step: int, pieces: list[int]) -> list[Cell]:
    """The largest first: what matters most is there should time run out. The very largest in one piece comes last.

    libfabric's development head never ends a message of 2 GiB ("error processing command" at its receiver; the sender
    is not told, seen on the rig too; 1 GiB passes). Whoever uses it is left out from there on.
    """
    sizes = []
    while smallest <= largest:
        sizes.append(smallest)
        smallest *= step
    found = [(size, count) for size in reversed(sizes) for count in pieces if size // count >= min(SMALLEST, size)]
    return sorted(found, key=lambda cell: cell == (sizes[-1], 1))


def contenders(a: argparse.Namespace, folder: Path) -> list[Contender]:
    found = [Contender("plain copy", None)] if a.memory == "torch" else []
    for number, pair in enumerate(a.pair):
        bench = Bench(pair, a, folder)
        version = f"NIXL {version_of(bench.nixl)}"
        found += [Contender(f"{version} as shipped", bench), Contender(f"{version} ctxfix", bench, ctxfix=True)]
        if number in a.line:
            found.append(Contender(f"{version} set_device", bench, choose=True))
        if number in a.ucx:
            found.append(Contender(f"{version} UCX", bench, backend="UCX"))
            found.append(Contender(f"{version} UCX ctxfix", bench, ctxfix=True, backend="UCX"))
    return found


def early(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The contenders of a cell that said done too early."""
    return [name for name, row in rows.items() if name != "plain copy" and row["ms"] and not row.get("whole")]


def best(rows: dict[str, dict[str, Any]], with_ctxfix: bool) -> tuple[str, float] | None:
    """The quickest contender of a cell, of those that did not say done too early."""
    times = {
        name: min(row["ms"])
        for name, row in rows.items()
        if name not in ("plain copy", *early(rows)) and row["ms"] and name.endswith("ctxfix") is with_ctxfix
    }
    name = min(times, key=times.__getitem__, default=None)
    return (name, times[name]) if name else None


def slower(rows: dict[str, dict[str, Any]]) -> float | None:
    """By how much ctxfix is slower than the best other contender, as a part of its time; None: one is missing."""
    ours, others = best(rows, True), best(rows, False)
    return ours[1] / others[1] - 1 if ours and others else None


def table(route: str, results: dict[str, dict[str, dict[str, Any]]]) -> list[str]:
    lines = [f"{route:5} {'bytes/pieces':>16}  {'plain':>9}  {'ctxfix':>9} {'':22} {'best other':>10}"]
    for cell, rows in results.items():
        plain = min(rows.get("plain copy", {}).get("ms") or [float("nan")])
        line = f"{route:5} {cell:>16}  {plain:9.3f} "
        for quickest in (best(rows, True), best(rows, False)):
            line += f" {quickest[1]:9.3f} {quickest[0]:22}" if quickest else f" {'-':>9} {'':22}"
        more = slower(rows)
        line += "" if more is None else f" {more * 100:+6.1f} %"
        wrong = [name for name, row in rows.items() if row.get("right") is False]
        lines.append(
            line
            + (f"  too early: {', '.join(early(rows))}" if early(rows) else "")
            + (f"  WRONG: {wrong}" if wrong else "")
        )
    found = {cell: more for cell, rows in results.items() if (more := slower(rows)) is not None}
    if found:
        worst = max(found, key=found.__getitem__)
        lines.append(
            f"{route:5} within {TARGET:.0%} of the best peer whose bytes were whole: "
            f"{sum(more <= TARGET for more in found.values())} of {len(found)} cells; "
            f"worst {found[worst] * 100:+.1f} % at {worst}"
        )
    return lines


def summary(row: dict[str, Any]) -> dict[str, Any]:
    ms = [round(value, 4) for value in row["ms"]]
    found = {"rounds": len(ms), **{key: row[key] for key in ("whole", "right") if key in row}, "ms": ms}
    return {**found, "best": min(ms), "median": round(statistics.median(ms), 4)} if ms else found


def measure(a: argparse.Namespace, record: dict[str, Any]) -> None:
    deadline = time.monotonic() + a.limit
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        all_of_them = contenders(a, folder)
        for number, route in enumerate(a.routes):
            until = time.monotonic() + (deadline - time.monotonic()) / (len(a.routes) - number)
            source, target = map(int, route.split(":"))
            runners = [Runner(contender, (source, target), a, folder) for contender in all_of_them]
            try:
                for runner in runners:
                    runner.begin(until)
                for runner in runners:
                    runner.stop()
                for cell in cells(a.smallest, a.largest, a.step, a.pieces):
                    for block in range(BLOCKS):
                        for runner in runners[block:] + runners[:block]:
                            if time.monotonic() < until:
                                runner.turn(cell, a.rounds, a.seconds, left(until, TRANSFER_S))
            finally:
                for runner in runners:
                    runner.end()
            results: dict[str, dict[str, Any]] = {}
            for size, count in cells(a.smallest, a.largest, a.step, a.pieces):
                rows = {r.name: summary(r.cells[size, count]) for r in runners if (size, count) in r.cells}
                if rows:
                    results[f"{size}/{count}"] = rows
            record["routes"][route] = results
            failures = {runner.name: runner.failure for runner in runners if runner.failure}
            record["failures"][route] = failures
            print("\n".join([*table(route, results), *(f"{n}: {f}" for n, f in failures.items())]), flush=True)
            a.out.write_text(json.dumps(record))


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    record = json.loads(path.read_text())
    for route, results in record["routes"].items():
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.5), sharey=True)
        names = list(dict.fromkeys(name for rows in results.values() for name in rows))
        by_cell = {tuple(map(int, cell.split("/"))): rows for cell, rows in results.items()}
        size = min({size for size, _ in by_cell}, key=lambda size: abs(size - 256 * MIB))
        fewest = min(count for _, count in by_cell)
        too_early = {name for rows in results.values() for name in early(rows)}
        for number, name in enumerate(names):
            style = {
                "color": "black" if name == "plain copy" else f"C{number % 10}",
                "linestyle": "-" if name.endswith("ctxfix") else ":" if name == "plain copy" else "--",
                "marker": "o" if name.endswith("ctxfix") else ".",
                "markerfacecolor": "white" if name in too_early else None,
                "label": f"{name} (done too early)" if name in too_early else name,
            }
            points = [
                (s, rows[name]["best"])
                for (s, c), rows in by_cell.items()
                if c == fewest and "best" in rows.get(name, {})
            ]
            left.loglog(*zip(*sorted(points), strict=True), **style) if points else None
            points = [
                (c, rows[name]["best"])
                for (s, c), rows in by_cell.items()
                if s == size and "best" in rows.get(name, {})
            ]
            right.loglog(*zip(*sorted(points), strict=True), **style) if points else None
        left.set(xlabel=f"bytes, in {fewest} piece{'s' if fewest > 1 else ''}", ylabel="ms, best")
        right.set(xlabel=f"pieces of {size / MIB:.0f} MiB")
        for axis in (left, right):
            axis.grid(True, which="major", alpha=0.3)
        gpus = record["machine"].get("gpus", ["?"])
        figure.suptitle(f"GPU {route.replace(':', ' to GPU ')}, {gpus[0]}: dashed without ctxfix, solid with it")
        right.legend(fontsize=8)
        figure.tight_layout()
        for suffix in ("png", "svg"):
            figure.savefig(path.with_name(f"{path.stem}-{route.replace(':', '-')}.{suffix}"), dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path, help="only draw what this file holds")
    parser.add_argument("--pair", action="append", default=[], metavar="NIXL:LIBFABRIC")
    parser.add_argument("--libraries", action="append", default=[], help="more folders of libraries")
    parser.add_argument("--preload", help="a fabric instead of integration/gpu's own, which shows shm as EFA")
    parser.add_argument("--line", type=int, nargs="*", default=[0, 1], help="pairs, by number, also with one line more")
    parser.add_argument("--ucx", type=int, nargs="*", default=[1], help="pairs, by number, also with UCX")
    parser.add_argument("--memory", choices=("torch", "rig"), default="torch")
    parser.add_argument("--routes", nargs="+", default=["1:1", "1:0"], help="SRC:DST devices")
    parser.add_argument("--smallest", type=int, default=64 * KIB)
    parser.add_argument("--largest", type=int, default=2 * GIB)
    parser.add_argument("--step", type=int, default=8, help="from one size to the next")
    parser.add_argument("--pieces", type=int, nargs="+", default=[1, 16, 256, 4096])
    parser.add_argument("--rounds", type=int, default=10, help="transfers in a turn, at most")
    parser.add_argument("--seconds", type=float, default=0.15, help="for a turn")
    parser.add_argument("--limit", type=float, default=240, help="seconds for all")
    parser.add_argument("--out", type=Path, default=Path("path.json"))
    a = parser.parse_args()
    if a.draw:
        draw(a.draw)
        return
    if not a.pair:
        parser.error("--pair is needed")
    a.launcher, a.stderr = "", 2000
    record: dict[str, Any] = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine() if a.memory == "torch" else {},
        "pairs": [pair.replace(str(Path(pair.split(":")[0]).parent) + "/", "") for pair in a.pair],
        "routes": {},
        "failures": {},
    }
    measure(a, record)


if __name__ == "__main__":
    main()
