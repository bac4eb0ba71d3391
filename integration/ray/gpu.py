# SPDX-License-Identifier: Apache-2.0
"""Ray Direct Transport on two real GPUs, with ctxfix and without: on which GPU tensors land, contexts, time.

    python integration/ray/gpu.py --python-path NIXL:RAY --preload FABRIC.so --libraries LIBFABRIC --out rdt.json

The receiver's GPU is 1, and it sees both. Needs two NVIDIA GPUs with peer access, torch with CUDA, and ctxfix
installed, so that its start-up file runs in every actor ("without" is CTXFIX_DISABLE=1). README.md says what to bring
to a machine without a network, and how large it is. Exit status 0: every tensor landed where it belongs with ctxfix,
and GPU 0 has no context of a receiver that had used its GPU before (docs/ray.md, Limits); 1 otherwise.
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
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "gpu"))

from run import machine  # noqa: E402

SCENARIOS = ["noset:argument", "noset:get_on_thread", "noset:get_on_main", "untouched:argument"]


def measure(options: argparse.Namespace, ctxfix: bool) -> list[dict[str, Any]]:
    """What the receivers say; an error in place of a run that did not end well."""
    scenarios = [name for name in SCENARIOS for _ in range(options.repeat)]
    command = [sys.executable, str(HERE / "receive.py"), *scenarios]
    # Ray forgets a peer whose registrations have changed and greets it anew; over libfabric's shm (2.4.0, NIXL 1.4.0)
    # nothing passes after that, with ctxfix or without.
    command += ["--size", str(options.size), "--gpus", "2", "--keep"]
    environment = dict(os.environ)
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, [options.python_path, os.environ.get("PYTHONPATH", "")])),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [options.libraries, os.environ.get("LD_LIBRARY_PATH", "")])),
        "RDT_LIBFABRIC": "1" if options.backend == "LIBFABRIC" else "",
        "RAY_USAGE_STATS_ENABLED": "0",
        "CTXFIX_DISABLE": "" if ctxfix else "1",
    }
    if options.preload:
        environment["LD_PRELOAD"] = options.preload
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            process.wait(options.deadline)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        log.seek(0)
        text = log.read()
    said = [json.loads(line) for line in text.splitlines() if line.startswith('{"scenario"')]
    return said if len(said) == len(scenarios) else [*said, {"scenario": "-", "error": text[-3000:]}]


def row(reports: list[dict[str, Any]], scenario: str) -> dict[str, Any]:
    """One line of the table: devices and contexts over all repetitions, the steady time without the first."""
    mine = [report for report in reports if report["scenario"] == scenario]
    whole = [report for report in mine if "error" not in report]
    # An argument has arrived when the method begins: the call's whole time, less what the method then does.
    times = [report["seconds"] or report["round_trip"] - report["checking"] for report in whole]
    return {
        "landed on": sorted({report["device"] for report in whole}),
        "belongs on": sorted({report["own"] for report in whole}),
        "contexts": sorted({device for report in whole for device in report["contexts"]}),
        "whole": bool(mine) and all(report["data_ok"] for report in whole) and len(whole) == len(mine),
        "best ms": round(min(times[1:] or times) * 1e3, 3) if times else None,
        "median ms": round(statistics.median(times[1:] or times) * 1e3, 3) if times else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python-path", default="", help="folders with nixl, ray and what they need")
    parser.add_argument("--preload", default="", help="the library that shows libfabric's shm as EFA (../gpu/fabric.c)")
    parser.add_argument("--libraries", default="", help="folders with libfabric and what else is not installed")
    parser.add_argument("--backend", choices=("LIBFABRIC", "UCX"), default="LIBFABRIC")
    parser.add_argument("--size", type=int, default=256 << 20, help="bytes of a tensor")
    parser.add_argument("--repeat", type=int, default=6, help="transfers of each kind, to one actor")
    parser.add_argument("--deadline", type=float, default=240)
    parser.add_argument("--out", type=Path, help="a file for all of it, as JSON")
    options = parser.parse_args()

    results = {name: measure(options, ctxfix) for name, ctxfix in (("without ctxfix", False), ("with ctxfix", True))}
    table = {name: {scenario: row(reports, scenario) for scenario in SCENARIOS} for name, reports in results.items()}
    for name, rows in table.items():
        print(name)
        for scenario, values in rows.items():
            print(f"  {scenario:22}", "  ".join(f"{key}: {value}" for key, value in values.items()))
        for report in results[name]:
            if "error" in report:
                print(f"  {report['scenario']}: {report['error']}")
    if options.out:
        record = {
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": {
                found.metadata["name"]: found.version
                for found in distributions(path=options.python_path.split(os.pathsep))
                if found.metadata["name"].startswith(("ray", "nixl"))
            },
            "size": options.size,
            "table": table,
            "reports": results,
        }
        options.out.write_text(json.dumps(record, indent=1))
    right = all(
        values["whole"]
        and values["landed on"] == values["belongs on"] == [1]
        and (values["contexts"] == [1] or scenario.startswith("untouched"))
        for scenario, values in table["with ctxfix"].items()
    )
    print("with ctxfix every tensor landed where it belongs" if right else "NOT every tensor landed where it belongs")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
