# SPDX-License-Identifier: Apache-2.0
"""Run `ctxfix verify` for each combination of NIXL, libfabric's shm and ctxfix, and put the verdicts into one table.

    python combinations.py --nixl 1.1.0=ENV/bin/python --nixl 1.4.0=OTHER/bin/python [--tp 2] [--out DIR] [-- OPTIONS]

OPTIONS go to `ctxfix verify`. The exit code is 0 if every combination with ctxfix is proven, 1 if one is not, and 2 if
one could not be run. README.md says what the table should read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Combination(NamedTuple):
    nixl: str
    python: str
    shm: bool
    ctxfix: bool

    @property
    def name(self) -> str:
        return f"nixl-{self.nixl}-shm-{'on' if self.shm else 'off'}{'-ctxfix' if self.ctxfix else ''}"


def combinations(pythons: dict[str, str]) -> list[Combination]:
    """As shipped with shm on and off, then with ctxfix and shm on."""
    shipped = [Combination(nixl, python, shm, False) for nixl, python in pythons.items() for shm in (True, False)]
    return shipped + [Combination(nixl, python, True, True) for nixl, python in pythons.items()]


def environment(one: Combination, environ: dict[str, str]) -> dict[str, str]:
    result = {name: value for name, value in environ.items() if not name.startswith("CTXFIX_")}
    result |= {
        "FI_EFA_ENABLE_SHM_TRANSFER": "1" if one.shm else "0",
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
    }
    return result


def command(one: Combination, out: Path, tp: int, options: list[str]) -> list[str]:
    result = [one.python, "-m", "ctxfix", "verify", "--tp", str(tp), "--record", str(out / one.name)]
    return [*result, "--json", str(out / f"{one.name}.json"), *([] if one.ctxfix else ["--without"]), *options]


def run(
    todo: list[Combination], out: Path, tp: int, options: list[str], runner: Callable[..., int]
) -> dict[Combination, dict[str, Any]]:
    """Run them one after the other; what each judged, or why it did not."""
    results: dict[Combination, dict[str, Any]] = {}
    for one in todo:
        print(f"== {one.name}", flush=True)
        code = runner(command(one, out, tp, options), environment(one, dict(os.environ)))
        verdict = out / f"{one.name}.json"
        try:
            results[one] = json.loads(verdict.read_text())
        except (OSError, ValueError) as error:
            results[one] = {
                "code": 2,
                "reason": f"exit code {code}, and no verdict ({error})",
                "rows": [],
                "problems": [],
            }
    return results


def table(results: dict[Combination, dict[str, Any]]) -> str:
    """The table in Markdown: a row for each combination and direction."""
    lines = [
        "| NIXL | shm | ctxfix | direction | path | bytes | failures | mean | stray | why |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one, verdict in results.items():
        head = f"| {one.nixl} | {'on' if one.shm else 'off'} | {'yes' if one.ctxfix else 'no'} "
        if not verdict["rows"]:
            lines.append(f"{head}| – | not run | – | – | – | – | {verdict['reason']} |")
        for row in verdict["rows"]:
            mean = "–" if row["mean_ms"] is None else f"{row['mean_ms']:.2f} ms"
            stray = sorted({*(row["stray"] or []), *(row["peer_stray"] or [])})
            why = "" if row["good"] else row["reasons"][0].replace("|", "\\|").replace("\n", " ")[:120]
            lines.append(
                f"{head}| {row['name']} | {row['path']} | {row['bytes']:,} | {row['failures']} | {mean} "
                f"| {', '.join(f'GPU {gpu}' for gpu in stray) or 'none'} | {why} |"
            )
    return "\n".join(lines) + "\n"


def exit_code(results: dict[Combination, dict[str, Any]]) -> int:
    if any(verdict["code"] == 2 for verdict in results.values()):
        return 2
    return int(any(verdict["code"] for one, verdict in results.items() if one.ctxfix))


def main(arguments: list[str] | None = None, runner: Callable[..., int] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nixl", action="append", required=True, metavar="VERSION=PYTHON")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("efa-results"))
    parser.add_argument("options", nargs="*", metavar="OPTIONS")
    options = parser.parse_args(arguments)
    pythons = dict(pair.partition("=")[::2] for pair in options.nixl)
    if not all(pythons.values()):
        parser.error("--nixl needs VERSION=PYTHON")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"{options.out} is not empty")
    options.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    runner = runner or (lambda command, environ: subprocess.run(command, env=environ).returncode)
    results = run(combinations(pythons), options.out, options.tp, options.options, runner)
    text = table(results)
    (options.out / "table.md").write_text(text)
    print(text)
    return exit_code(results)


if __name__ == "__main__":
    sys.exit(main())
