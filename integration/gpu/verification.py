# SPDX-License-Identifier: Apache-2.0
"""Runs `ctxfix verify --compare` on real GPUs, for pairs of NIXL and libfabric, on the loopback fabric of this folder.

    python integration/gpu/verification.py --pair DIR_OF_NIXL:DIR_OF_LIBFABRIC … [--libraries FOLDER …] --out DIR [--
    OPTIONS]

For each pair, DIR gets a folder with the records, the verdicts as JSON and JUnit, and the report as an HTML page.
OPTIONS go to `ctxfix verify`: --tp 2 is the default. The exit code is 0 if every rank is proven with ctxfix for every
pair.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from run import Bench


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", action="append", required=True, metavar="NIXL:LIBFABRIC")
    parser.add_argument("--libraries", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("options", nargs="*")
    a = parser.parse_args()
    a.launcher, a.stderr = "", 4000
    a.out.mkdir(parents=True, exist_ok=True)
    worst = 0
    for pair in a.pair:
        bench = Bench(pair, a, a.out)
        print(f"== {bench.name}", flush=True)
        code, _ = verify(bench, a.out / "+".join(Path(p).name for p in pair.split(":")), "--compare", *a.options)
        worst = max(worst, code)
    return worst


if __name__ == "__main__":
    os.environ.pop("CTXFIX_DISABLE", None)
    sys.exit(main())
