# SPDX-License-Identifier: Apache-2.0
"""Runs `ctxfix verify --compare` on real GPUs, for pairs of NIXL and libfabric, on the loopback fabric of this folder.

    python integration/gpu/verification.py --pair DIR_OF_NIXL:DIR_OF_LIBFABRIC … [--libraries FOLDER …] --out DIR [--
    OPTIONS]

For each pair, DIR gets a folder with the records, the verdicts as JSON and JUnit, and the report as an HTML page;
verification.json there holds the verdicts of all, how even the ranks are, machine and versions. OPTIONS go to `ctxfix
verify`: --tp 2 is the default, and `-- --tp 4` is TP 4, on eight GPUs one for each process, on fewer shared. The exit
code is 0 if every rank is proven with ctxfix for every pair.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from run import Bench, machine


def verify(bench: Bench, out: Path, *options: str, limit_s: float = 500) -> tuple[int, dict[str, Any]]:
    """Run it for one pair; the exit code and the verdict with ctxfix."""
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = bench.environment(True, out / "fabric")
    loopback = environment.pop("LD_PRELOAD")  # for the workers only
    environment.pop("FABRIC_COUNTS")
    files = [f"--{kind}={out / f'verdict.{kind}'}" for kind in ("json", "html", "junit")]
    command = [sys.executable, "-m", "ctxfix", "verify", "--tp", "2", "--loopback", loopback]
    command += ["--record", str(out / "records"), *files, *options]
    code = subprocess.run(command, env=environment, timeout=limit_s).returncode
    verdict = out / "verdict.json"
    return code, json.loads(verdict.read_text()) if verdict.exists() else {}


def report(records: Path) -> dict[str, Any]:
    """The verdict on records that are there."""
    command = [sys.executable, "-m", "ctxfix", "report", str(records), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return dict(json.loads(done.stdout)) if done.stdout.startswith("{") else {"reason": done.stderr[-2000:]}


def evenness(times: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By direction and shape: the slowest rank's median time over rank 0's."""
    medians: dict[tuple[str, str], dict[int, float]] = {}
    for row in times:
        role, _, rank = row["direction"].partition(" → ")[0].partition(" rank ")
        medians.setdefault((role, row["shape"]), {})[int(rank)] = statistics.median(row["ms"])
    over: dict[str, dict[str, float]] = {}
    for (role, shape), by_rank in medians.items():
        over.setdefault(role, {})[shape] = round(max(by_rank.values()) / by_rank[0], 3)
    return over


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", action="append", required=True, metavar="NIXL:LIBFABRIC")
    parser.add_argument("--libraries", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("options", nargs="*")
    a = parser.parse_args()
    a.launcher, a.stderr = "", 4000
    a.out.mkdir(parents=True, exist_ok=True)
    worst, results = 0, []
    record = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "results": results,
    }
    for pair in a.pair:
        bench = Bench(pair, a, a.out)
        print(f"== {bench.name}", flush=True)
        folder = a.out / "+".join(Path(p).name for p in pair.split(":"))
        code, verdict = verify(bench, folder, "--compare", *a.options)
        worst = max(worst, code)
        over = evenness(verdict.get("times", []))
        without = report(folder / "records" / "without")
        results.append(
            {"pair": bench.name, "code": code, "with": verdict, "slowest_over_rank_0": over, "without": without}
        )
        (a.out / "verification.json").write_text(json.dumps(record, indent=1))
        for role, shapes in over.items():
            print(f"{role} sends: slowest rank over rank 0, by medians:", shapes, flush=True)
    return worst


if __name__ == "__main__":
    os.environ.pop("CTXFIX_DISABLE", None)
    sys.exit(main())
