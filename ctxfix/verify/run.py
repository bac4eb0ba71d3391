# SPDX-License-Identifier: Apache-2.0
"""``ctxfix verify``: processes for each rank, what they move, and the verdict on it.

For each rank a prefill and a decode process are started on this host, each with all GPUs visible, as tensor-parallel
servers are. Started by torchrun, srun or mpirun (a rank and a world size in the environment), only that rank's pair is:
we are no launcher. All write into one folder of records, which rank 0 judges.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ctxfix._status import folders_of, has_module
from ctxfix.cli import show
from ctxfix.errors import CtxfixError, EvidenceError, VerifyError
from ctxfix.evidence import efa, identity, merge, nvlink, records
from ctxfix.verify import gpu, shapes
from ctxfix.verify.verdict import Judgement, judge

_MODULES = ("nixl_cu13", "nixl_cu12")
#: The least and the most that options may be: 4,096 ranks, buffers of up to about 1 TiB, a week.
_BOUNDS = {
    "tp": (1, 4096),
    "size": (8 * 4096, 1 << 40),
    "tokens": (2, 1 << 25),
    "repeat": (1, 1_000_000),
    "timeout": (1, 7 * 86_400),
}
_TRANSFER_TIMEOUT = 30.0  # seconds, for one transfer
_ENDING = 20.0  # seconds a process may take to end
_NIXL_ERROR = re.compile(r"E\d{4} .*?\] (.+)")  # E1201 00:19:09.930210   22978 nixl_agent.cpp:458] registerMem: no …
# What a worker process runs. Python puts the current folder first on the path of a program given by -c or -m, and
# anybody may have laid modules there (/tmp): it is off before anything is imported. The package is the one that runs
# this command; its folder is on the path only while the package is found, as in `ctxfix run`.
_WORKER = (
    "import sys; package = sys.argv.pop(); sys.path[:] = [package] + [entry for entry in sys.path if entry]; "
    "import ctxfix; sys.path.remove(package); from ctxfix.verify.worker import main; sys.exit(main())"
)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@dataclass(frozen=True)
class Plan:
    """What is to be run."""

    ranks: list[int]  # those that this command starts
    world: int
    rank_source: str
    gpus: int
    module: str
    backend: str
    size: int
    tokens: int
    repeat: int
    timeout: float
    loopback: str | None
    cross: bool
    cupti: bool = True

    def gpu_of(self, role: str, rank: int) -> int:
        """A GPU for each process if there are enough; else decode shares its prefill's, or the next one's (cross)."""
        if role == "prefill" or not self.cross:
            own = rank + (self.world if role == "decode" and self.gpus >= 2 * self.world else 0)
            return own % self.gpus
        return (rank + 1) % self.gpus

    def seating(self) -> str:
        """Who sits where, for the report."""
        pairs = [f"rank {r}: {self.gpu_of('prefill', r)}→{self.gpu_of('decode', r)}" for r in range(self.world)]
        shared = (
            "" if self.gpus >= 2 * self.world else f" ({self.gpus} GPUs for {2 * self.world} processes: some share)"
        )
        return "GPUs of prefill→decode: " + ", ".join(pairs) + shared


def main(options: argparse.Namespace) -> int:
    """Carry out the command; its exit code."""
    try:
        plan = make_plan(options)
        with _folder(options, plan) as folder:
            code = _carry_out(options, plan, folder.path)
            folder.keep = code != 0
            return code
    except CtxfixError as error:
        print(f"ctxfix verify: {error}", file=sys.stderr)
        return 2


def make_plan(options: argparse.Namespace) -> Plan:
    """What is to be run here. Raises VerifyError if it cannot be."""
    place = identity.find(os.environ)
    launched = place.rank is not None and (place.world or 0) > 1
    asked = 2 if options.tp is None else options.tp
    world = place.world if launched and place.world else asked
    for name, (least, most) in _BOUNDS.items():
        value = world if name == "tp" else getattr(options, name)
        if not least <= value <= most:  # nan is neither
            raise VerifyError(f"--{name} must be from {least:,} to {most:,}, not {value}")
    if options.tp is not None and options.tp != world:
        raise VerifyError(f"--tp {options.tp}, but {place.source} says that there are {world} ranks")
    modules = _MODULES if options.module is None else (options.module,)
    module = next((name for name in modules if has_module(folders_of(name), f"{name}._api")), None)
    if module is None:
        raise VerifyError(f"NIXL is not installed here (no module {' or '.join(modules)} with NIXL's _api in it): "
                          "pip install nixl")  # fmt: skip
    gpus = gpu.count()
    if not gpus:
        raise VerifyError("there is no GPU in this machine, or CUDA_VISIBLE_DEVICES hides them all")
    if options.loopback and not os.path.exists(options.loopback):
        raise VerifyError(f"{options.loopback}: there is no such library")
    return Plan(
        ranks=[place.rank] if launched and place.rank is not None else list(range(world)),
        world=world,
        rank_source=place.source if launched else "ctxfix verify",
        gpus=gpus,
        module=module,
        backend=options.backend,
        size=options.size,
        tokens=options.tokens,
        repeat=options.repeat,
        timeout=options.timeout,
        loopback=os.path.abspath(options.loopback) if options.loopback else None,
        cross=options.cross,
        cupti=not options.without_cupti,
    )


@dataclass
class _Folder:
    path: str
    keep: bool = True


@contextlib.contextmanager
def _folder(options: argparse.Namespace, plan: Plan) -> Iterator[_Folder]:
    """The folder of records: the user's, or a temporary one that stays if something is wrong."""
    if options.record:
        os.close(records.open_folder(options.record))
        if len(plan.ranks) == plan.world and os.listdir(options.record):
            raise VerifyError(f"{options.record} is not empty: use a new folder for each run")
        yield _Folder(os.path.abspath(options.record))
        return
    if len(plan.ranks) < plan.world:
        raise VerifyError("under a launcher the ranks need a folder that all of them see: --record DIR")
    folder = _Folder(tempfile.mkdtemp(prefix="ctxfix-verify-"))
    try:
        yield folder
    finally:
        if folder.keep:
            print(f"ctxfix verify: the records and logs of the processes are in {folder.path}", file=sys.stderr)
        else:
            shutil.rmtree(folder.path, ignore_errors=True)


def _carry_out(options: argparse.Namespace, plan: Plan, folder: str) -> int:
    quiet = options.json == "-"

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    say(plan.seating())
    network = efa.read()
    if plan.backend == "LIBFABRIC" and not network["known"] and not plan.loopback:
        say(
            f"No EFA here ({network['reason']}): unless NIXL's LIBFABRIC backend finds another fabric it takes no GPU "
            "memory (NIXL_ERR_NOT_FOUND). --loopback LIB shows it libfabric's shm instead (integration/rig)."
        )
    modes = [True, False] if options.compare else [bool(options.without)]
    judgements: dict[bool, Judgement] = {}
    sizes = {shape.name: shape.bytes for shape in shapes.all_of(plan.size, plan.tokens)}
    for disabled in modes:
        inner = folder
        if len(modes) > 1:
            inner = os.path.join(folder, "without" if disabled else "with")
            os.makedirs(inner, mode=0o700, exist_ok=True)
        times: Times = {}
        links = nvlink.read()
        problems = run_once(plan, inner, disabled, quiet, times)
        carried = nvlink.told(links, nvlink.read())
        if 0 not in plan.ranks:
            if problems:
                raise VerifyError("; ".join(problems))
            continue
        judgements[disabled] = _judge(plan, inner, problems)
        judgements[disabled].nvlink = carried
        judgements[disabled].times = [
            {"direction": direction, "shape": shape, "bytes": sizes[shape], "ms": [round(s * 1e3, 3) for s in seconds]}
            for (direction, shape), seconds in sorted(times.items())
        ]
    if not judgements:
        say(f"rank {plan.ranks[0]} is done; rank 0 judges")
        return 0
    last = judgements[modes[-1]]
    # A run that could not be, for the same reason as the other, is not told twice.
    both = options.compare and not quiet and (judgements[True].rows or judgements[True].reason != last.reason)
    if both:
        _print(judgements[True], "without ctxfix")
    show(options, last, "without ctxfix" if modes[-1] else "with ctxfix")
    if both:
        _print_comparison(judgements[True], judgements[False])
    return last.code


def _judge(plan: Plan, folder: str, problems: list[str]) -> Judgement:
    """Judge what all ranks recorded, those of other hosts too, once they are there."""
    deadline = time.monotonic() + (plan.timeout if len(plan.ranks) < plan.world else 0)
    while True:
        try:
            run = merge.read(folder)
        except EvidenceError as error:
            raise VerifyError("\n".join([str(error), *problems])) from error
        final = {(p.identity.role, p.identity.rank) for p in run.processes if p.final}
        if len(final) >= 2 * plan.world or time.monotonic() >= deadline:
            break
        time.sleep(1)
    if len(plan.ranks) < plan.world and len(final) < 2 * plan.world:
        problems = [*problems, f"{len(final)} of {2 * plan.world} processes ended in time, or the folder is not shared"]
    judgement = judge(run, ranks=plan.world)
    if problems and not judgement.rows:  # said once
        judgement.problems, judgement.reason = [], f"nothing was moved: {'; '.join(problems)}"
        return judgement
    judgement.problems[:0] = problems
    if problems and not judgement.code:
        judgement.code, judgement.reason = 1, f"the workload did not run to its end: {problems[0]}"
    return judgement


# ---- one run ---------------------------------------------------------------------------------------------------------


#: (direction, shape) -> seconds of each transfer, from its post until NIXL said DONE.
Times = dict[tuple[str, str], list[float]]


def run_once(plan: Plan, folder: str, disabled: bool, quiet: bool, times: Times) -> list[str]:
    """Run the whole workload, all ranks at once, and fill ``times``; what went wrong."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ctxfix.console import Console

    forms = shapes.all_of(plan.size, plan.tokens)
    total = 2 * plan.repeat * len(forms)
    problems: dict[str, list[int]] = {}  # what went wrong -> on which ranks
    started: list[Process] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr, quiet=quiet), transient=True) as progress:
        threads = []
        for rank in plan.ranks:
            task = progress.add_task(f"{'without' if disabled else 'with'} ctxfix, rank {rank}", total=total)

            def work(rank: int = rank, task: Any = task) -> None:
                try:
                    _run_pair(plan, rank, folder, disabled, forms, times, started, lambda: progress.advance(task))
                except Exception as error:  # noqa: BLE001 - a rank that ends in silence would look as if all went well
                    known = isinstance(error, (CtxfixError, OSError))
                    told = str(error) if known else f"{type(error).__name__}: {error}"
                    problems.setdefault(told, []).append(rank)

            threads.append(threading.Thread(target=work, name=f"rank {rank}"))
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: the threads end when their processes do
            while any(thread.is_alive() for thread in threads):
                for process in started:
                    process.kill()
                time.sleep(0.1)
            raise
    return sorted(
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}: {error}"
        for error, ranks in problems.items()
    )


def _run_pair(
    plan: Plan,
    rank: int,
    folder: str,
    disabled: bool,
    forms: list[shapes.Shape],
    times: Times,
    started: list[Process],
    advance: Callable[[], object],
) -> None:
    deadline = time.monotonic() + plan.timeout
    with contextlib.ExitStack() as stack:
        ends = {
            role: stack.enter_context(Process(plan, role, rank, folder, disabled, deadline))
            for role in ("prefill", "decode")
        }
        prefill, decode = ends["prefill"], ends["decode"]
        started += ends.values()
        about = {role: end.answer() for role, end in ends.items()}
        prefill.ask("meet", **about["decode"])
        decode.ask("meet", **about["prefill"])
        number = 0
        for form in forms:
            for sender, receiver in ((prefill, decode), (decode, prefill)):
                for _ in range(plan.repeat):
                    number += 1
                    sender.ask("fill", shape=form.name, transfer=number)
                    receiver.order("receive", shape=form.name, transfer=number, timeout=_TRANSFER_TIMEOUT)
                    sender.order("send", shape=form.name, transfer=number, timeout=_TRANSFER_TIMEOUT)
                    sent, received = sender.answer(), receiver.answer()
                    advance()
                    direction = f"{sender.role} rank {rank} → {receiver.role} rank {rank}"
                    times.setdefault((direction, form.name), []).append(sent["seconds"])
                    if sent["state"] != "DONE" or received["state"] != "DONE":
                        for end in (prefill, decode):
                            with contextlib.suppress(VerifyError):
                                end.ask("finish")
                        raise VerifyError(
                            f"transfer {number} ({form.name}, {sender.role} to {receiver.role}) did not end: the "
                            f"sender says {sent['state']}, the receiver {received['state']}"
                        )
        prefill.ask("finish")
        decode.ask("finish")


class Process:
    """A worker process, and the pipes to it."""

    def __init__(self, plan: Plan, role: str, rank: int, folder: str, disabled: bool, deadline: float) -> None:
        self.role, self.rank, self._deadline = role, rank, deadline
        self.log = os.path.join(folder, f"{role}{rank}{merge.LOG_SUFFIX}")
        order_read, order_write = os.pipe()
        answer_read, answer_write = os.pipe()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(self.log, flags, 0o600), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WORKER, str(order_read), str(answer_write), _PACKAGE],
                env=environment(os.environ, folder, disabled, plan.loopback),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(order_read, answer_write),
            )
        os.close(order_read)
        os.close(answer_write)
        self._orders = os.fdopen(order_write, "w", buffering=1)
        self._answers = os.fdopen(answer_read, "rb", buffering=0)
        self._pending = b""
        number = 2 * rank + (role == "decode")
        self._write(
            {
                "role": role,
                "rank": rank,
                "world": plan.world,
                "rank_source": plan.rank_source,
                "gpu": plan.gpu_of(role, rank),
                "limit": plan.gpu_of("prefill", rank) == plan.gpu_of("decode", rank),
                "module": plan.module,
                "backend": plan.backend,
                "size": plan.size,
                "tokens": plan.tokens,
                "record": folder,
                "cupti": plan.cupti,
                "seed": number,
                "peer_seed": number ^ 1,
            }
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._orders.close()
        self._answers.close()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def order(self, what: str, **arguments: Any) -> None:
        """Tell it to do something."""
        self._write({"do": what, **arguments})

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """Tell it to do something, and wait for the answer."""
        self.order(what, **arguments)
        return self.answer()

    def _write(self, value: dict[str, Any]) -> None:
        try:
            self._orders.write(json.dumps(value) + "\n")
        except OSError as error:
            raise VerifyError(self._dead()) from error

    def answer(self) -> dict[str, Any]:
        """Its answer. Raises VerifyError if it died, failed or is late."""
        while b"\n" not in self._pending:
            left = self._deadline - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                self._process.kill()
                raise VerifyError(f"{self.role} did not answer in time and was killed (--timeout); see {self.log}")
            data = self._answers.read(1 << 20)
            if not data:
                raise VerifyError(self._dead())
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        value: dict[str, Any] = json.loads(line)
        if "error" in value:
            raise VerifyError(f"{self.role}: {value['error']}{self._said()}")
        return value

    def _dead(self) -> str:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return f"{self.role} closed its end"
        return f"{self.role} died with exit code {code}{self._tail()}"

    def _tail(self) -> str:
        return "".join(f"\n    {line}" for line in self._logged()[-6:])

    def _said(self) -> str:
        """NIXL's own last error, which its exceptions do not tell."""
        said = [found[1] for found in map(_NIXL_ERROR.match, self._logged()) if found]
        return f" ({said[-1]})" if said else ""

    def _logged(self) -> list[str]:
        try:
            with open(self.log, "rb") as log:
                return log.read()[-4000:].decode(errors="replace").strip().splitlines()
        except OSError:
            return []


def environment(environ: Any, folder: str, disabled: bool, loopback: str | None) -> dict[str, str]:
    """A worker's environment: libfabric says what it has to say, into our log, whatever the user's shell filters."""
    result = {
        name: value
        for name, value in environ.items()
        if name not in ("FI_LOG_PROV", "FI_LOG_SUBSYS", "FI_LOG_LOCATION")
    }
    result.setdefault("FI_LOG_LEVEL", "warn")
    result["CTXFIX_RECORD"] = folder
    result["CTXFIX_DISABLE"] = "1" if disabled else "0"
    if loopback:
        before = result.get("LD_PRELOAD", "")
        if loopback not in before.split(os.pathsep):
            result["LD_PRELOAD"] = os.pathsep.join(filter(None, (loopback, before)))
        result.setdefault("RIG_HMEM", "keep")
    return result


# ---- both runs, side by side -----------------------------------------------------------------------------------------


def _print(judgement: Judgement, title: str) -> None:
    from ctxfix.console import console
    from ctxfix.verify import report

    console(160).print(report.table(judgement, title))


def _print_comparison(without: Judgement, with_ctxfix: Judgement) -> None:
    """The best time of each direction and shape, without and with."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ctxfix.console import console
    from ctxfix.verify.report import size

    table = Table(box=box.SIMPLE_HEAD, title="what ctxfix changes (best times)", title_justify="left", pad_edge=False)
    for head in ("direction", "path without", "path with", "what", "bytes", "without", "with", "faster"):
        table.add_column(
            head, justify="left" if head in ("direction", "path without", "path with", "what") else "right"
        )
    before = {(row["direction"], row["shape"]): min(row["ms"]) for row in without.times}
    paths = [{row.name: row for row in judgement.rows} for judgement in (without, with_ctxfix)]
    last = ""
    for entry in with_ctxfix.times:
        name, shape, new = entry["direction"], entry["shape"], min(entry["ms"])
        old = before.get((name, shape))
        rows = [found.get(name) for found in paths] if name != last else [None, None]
        cells = [Text(row.path.value, "green" if row.good else "red") if row else Text("") for row in rows]
        table.add_row(
            name if name != last else "",
            *cells,
            shape,
            size(entry["bytes"]),
            f"{old:.2f} ms" if old is not None else "–",
            f"{new:.2f} ms",
            f"{old / new:.1f}×" if old is not None and new else "–",
        )
        last = name
    console(160).print(table)
