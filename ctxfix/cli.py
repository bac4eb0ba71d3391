# SPDX-License-Identifier: Apache-2.0
"""The ``ctxfix`` command. Each subcommand is one function that declares it and one that carries it out."""

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ctxfix
from ctxfix import _startup

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ctxfix.verify.verdict import Judgement

    Commands = _SubParsersAction[argparse.ArgumentParser]

EXIT_COULD_NOT_RUN = 2
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141  # as a shell tells SIGINT and SIGPIPE
BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_bootstrap")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv`` by default) and return its exit code."""
    # A stream that is closed (`>&-`) is None to Python. CMD of `ctxfix run` finds it closed as ever: what Python opens
    # does not outlive an exec.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    try:
        try:
            return _carry_out(arguments)
        finally:
            sys.stdout.flush()  # also after --help, which exits
    except ModuleNotFoundError as error:
        return _stop(f"ctxfix: {error.name} is not installed here; install it for {sys.executable}", EXIT_COULD_NOT_RUN)
    except BrokenPipeError:  # whoever read us has enough
        return _stop("", EXIT_BROKEN_PIPE)
    except OSError as error:  # a full disk, say
        return _stop(f"ctxfix: {error}", EXIT_COULD_NOT_RUN)
    except KeyboardInterrupt:
        return _stop("ctxfix: interrupted", EXIT_INTERRUPTED)


def _stop(message: str, code: int) -> int:
    """Say why the command ends; ``code``."""
    for stream in (sys.stderr, sys.stdout):
        try:
            if message and stream is sys.stderr:
                print(message, file=stream)
            stream.flush()
        except OSError:  # so that nothing complains at exit, which would change the code, too
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def _carry_out(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="ctxfix",
        description="Every thread that touches a GPU transfer runs in the context of the memory it touches.",
    )
    parser.add_argument("--version", action="version", version=f"ctxfix {ctxfix.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for declare in (_declare_status, _declare_doctor, _declare_run, _declare_verify, _declare_report):
        declare(commands)
    options = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a sign shows a question mark
    code: int = options.carry_out(options)
    return code


def _declare_status(commands: "Commands") -> None:
    parser = commands.add_parser("status", help="say what is on, off or pending in this environment, and why")
    parser.add_argument("--json", action="store_true", help="print one JSON object with stable keys")
    parser.set_defaults(carry_out=_status)


def _status(options: argparse.Namespace) -> int:
    report = ctxfix.status()
    if options.json:
        import json

        print(json.dumps(report, indent=2))
    else:
        _print_status(report)
    return 0


def _print_status(report: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from ctxfix.console import console

    out = console(500)
    table = Table(box=box.SIMPLE, show_header=False, title=f"ctxfix {report['version']}", title_justify="left")
    # Modules have long names; the reason is what the table is for.
    table.add_column(overflow="fold", max_width=max(out.width // 3, 16))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    styles = {
        "on": "green",
        "patched": "green",
        "found": "green",
        "off": "yellow",
        "left out": "yellow",
        "absent": "yellow",
        "failed": "red",
        "bad": "red",
    }

    def row(what: str, state: str, why: str = "") -> None:
        table.add_row(Text(what), Text(state, styles.get(state, "")), Text(why))

    row("activation", "on" if report["active"] else "off", report["reason"])
    python = report["python"]
    row("interpreter", "", f"{python['implementation']} {python['version']}, {python['executable']}")
    if python["free_threaded"]:
        if python["gil"]:
            row("GIL", "on", "another module, or PYTHON_GIL=1, turned it on")
        else:
            row("GIL", "off", "ctxfix and its native part need none")
    row("package", "", report["location"])
    files = report["start_files"]
    for file in [file for file in files if file["runs"]] or files:
        why = f" ({file['reason']})" if file["reason"] else ""
        row("start-up file", "on" if file["runs"] else "off", file["path"] + why)
    if not files:
        row("start-up file", "missing", "interpreters are served by `ctxfix run` or `import ctxfix` only")
    for name, target in report["targets"].items():
        version = f"version {target['version']}" if target["version"] else ""
        row(name, target["state"], "; ".join(filter(None, (version, target["reason"]))))
    plugin = report["sglang_plugin"]
    row("SGLang plugin", plugin["state"], plugin["reason"])
    row("Python threads", "on" if report["threads"]["installed"] else "waiting", report["threads"]["reason"])
    row("native part", "on" if report["native"]["available"] else "off", report["native"]["reason"])
    for name, version in report["libraries"].items():
        row(name, "found" if version else "missing", version or "")
    for name, value in report["settings"].items():
        if name != "problems":
            row(f"setting {name}", "", str(value))
    for problem in report["settings"]["problems"]:
        row("setting", "bad", problem)
    for name, value in report["counters"].items():
        row(f"count {name}", str(value))
    for where, failure in report["failures"].items():
        row("failure", "failed", f"{where}: {failure}")
    out.print(table)


def _declare_run(commands: "Commands") -> None:
    parser = commands.add_parser(
        "run",
        help="run a command with ctxfix active in every Python it starts",
        usage="ctxfix run [--record DIR] [--strict] -- CMD…",
        description="Run a command with ctxfix active in every Python it starts, also of other environments. "
        "Interpreters that ignore PYTHONPATH (-I, -E, -S) are not reached.",
    )
    parser.add_argument("--record", type=_folder, metavar="DIR", help="write what is observed into DIR (CTXFIX_RECORD)")
    parser.add_argument("--strict", action="store_true", help="raise failures of ctxfix itself (CTXFIX_STRICT)")
    parser.add_argument("cmd", nargs=argparse.REMAINDER, metavar="CMD", help="the command and its arguments")
    parser.set_defaults(carry_out=_run, parser=parser)


def _run(options: argparse.Namespace) -> int:
    """Become the command: its exit status is ours."""
    command = options.cmd[1:] if options.cmd[:1] == ["--"] else options.cmd
    if not command:
        options.parser.error("no command given; write it after --")
    if os.pathsep in BOOTSTRAP:
        print(f"ctxfix run: {BOOTSTRAP}: PYTHONPATH cannot hold a path with {os.pathsep!r} in it", file=sys.stderr)
        return EXIT_COULD_NOT_RUN
    environment = run_environment(os.environ, options.record, options.strict)
    off = _startup.off_reason()
    with contextlib.suppress(OSError):  # an output that nobody takes is for the command to find
        if off:
            print(f"ctxfix run: {off}: the command runs without ctxfix", file=sys.stderr)
        sys.stdout.flush()
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores for itself; subprocess gives them back likewise
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except (FileNotFoundError, NotADirectoryError):
        print(
            f"ctxfix run: {command[0]}: not found: neither a file nor a command on PATH, or its first line "
            "names an interpreter that is not there",
            file=sys.stderr,
        )
        return EXIT_NOT_FOUND
    except (OSError, ValueError) as error:
        print(f"ctxfix run: {command[0]}: cannot be run: {error}", file=sys.stderr)
        return EXIT_NOT_EXECUTABLE


def _folder(name: str) -> str:
    """The folder that an option names, by its whole path: the command may go elsewhere."""
    if not name:
        raise argparse.ArgumentTypeError("the name of the folder is empty")
    try:
        return os.path.abspath(name)
    except FileNotFoundError:
        raise argparse.ArgumentTypeError(f"{name}: the current folder is no longer there") from None


def _declare_doctor(commands: "Commands") -> None:
    parser = commands.add_parser(
        "doctor",
        help="name what in this machine decides the path of transfers",
        description="Looks, and changes nothing. Exit code: 1 if something is bad, else 0.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with stable keys")
    parser.set_defaults(carry_out=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from ctxfix.verify.doctor import main as examine

    return examine(options.json)


def _declare_verify(commands: "Commands") -> None:
    parser = commands.add_parser(
        "verify",
        help="move data between GPUs as applications do, and prove which path it took, rank by rank",
        description="Starts a prefill and a decode process for each rank, moves KV-cache-shaped data through NIXL in "
        "both directions, compares the bytes and judges. Under torchrun, srun or mpirun it starts only its own rank's "
        "pair. Exit code: 0 every rank is proven, 1 a rank is not, 2 it could not be run.",
    )
    parser.add_argument("--tp", type=int, metavar="N", help="ranks (default: 2, or the launcher's world size)")
    parser.add_argument("--backend", default="LIBFABRIC", choices=["LIBFABRIC", "UCX"])
    parser.add_argument("--size", type=int, default=2 << 30, metavar="BYTES", help="of the large transfers (2 GiB)")
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="of the KV-cache transfers, page size 1")
    parser.add_argument("--repeat", type=int, default=4, metavar="N", help="transfers of each shape and direction")
    parser.add_argument(
        "--module", metavar="NAME", help="NIXL's module: nixl_cu12, nixl_cu13 (default: the one there is)"
    )
    parser.add_argument("--loopback", metavar="LIB", help="preload a loopback fabric, where there is no EFA")
    parser.add_argument("--cross", action="store_true", help="each decode rank on the GPU of the next prefill rank")
    parser.add_argument("--without", action="store_true", help="with ctxfix off: what the path is as shipped")
    parser.add_argument("--compare", action="store_true", help="first without, then with ctxfix")
    parser.add_argument(
        "--without-cupti", action="store_true", help="do not ask the GPU for its own account, which costs a little time"
    )
    parser.add_argument(
        "--record", type=_folder, metavar="DIR", help="keep the records there (default: a temporary folder)"
    )
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="for one run (default 300)")
    _declare_outputs(parser)
    parser.set_defaults(carry_out=_verify)


def _verify(options: argparse.Namespace) -> int:
    from ctxfix.verify.run import main as verify

    return verify(options)


def _declare_report(commands: "Commands") -> None:
    parser = commands.add_parser(
        "report",
        help="judge what was recorded (CTXFIX_RECORD=DIR), rank by rank",
        description="Exit code: 0 every rank is proven, 1 a rank is not, 2 nothing could be judged.",
    )
    parser.add_argument("folder", metavar="DIR", help="the folder of records; sub-folders, one a host, are read too")
    parser.add_argument("--ranks", type=int, metavar="N", help="how many ranks must post (default: what they say)")
    parser.add_argument("--log", action="append", metavar="FILE", help="a saved log of libfabric's, also several")
    parser.add_argument("--unchecked", action="store_true", help="do not ask that the bytes were compared")
    _declare_outputs(parser)
    parser.set_defaults(carry_out=_report)


def _declare_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the verdict as JSON (-: to stdout, instead of the table)")
    parser.add_argument("--html", metavar="FILE", help="write it as an HTML page that stands alone")
    parser.add_argument("--junit", metavar="FILE", help="write it as JUnit XML")


def _report(options: argparse.Namespace) -> int:
    from ctxfix.errors import CtxfixError
    from ctxfix.evidence import merge
    from ctxfix.verify import report, verdict

    try:
        run = merge.read(options.folder, options.log)
        judgement = verdict.judge(run, options.ranks, compared=not options.unchecked)
        show(options, judgement, report.default_title(options.folder))
    except CtxfixError as error:
        print(f"ctxfix report: {report.printable(str(error))}", file=sys.stderr)
        return 2
    return judgement.code


def show(options: argparse.Namespace, judgement: "Judgement", title: str) -> None:
    """Show a judgement in every form that was asked for."""
    from ctxfix.console import console
    from ctxfix.verify import report

    if options.json == "-":
        print(report.as_text(judgement), end="")
    else:
        console(160).print(report.table(judgement, title))
    if options.json and options.json != "-":
        report.write(options.json, report.as_text(judgement))
    if options.html:
        report.write(options.html, report.html(judgement, title))
    if options.junit:
        report.write(options.junit, report.junit(judgement))


def run_environment(
    environment: "os._Environ[str] | dict[str, str]", record: str | None, strict: bool
) -> dict[str, str]:
    """Return the command's environment: our sitecustomize first on PYTHONPATH, options as variables."""
    result = dict(environment)
    # An empty entry would put the working directory on the path, where PYTHONPATH had none.
    entries = [entry for entry in (BOOTSTRAP, result.get("PYTHONPATH", "")) if entry]
    result["PYTHONPATH"] = os.pathsep.join(entries)
    if record is not None:
        result["CTXFIX_RECORD"] = record
    if strict:
        result["CTXFIX_STRICT"] = "1"
    return result
