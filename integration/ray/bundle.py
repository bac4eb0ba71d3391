# SPDX-License-Identifier: Apache-2.0
"""Put Ray's core, and what it imports, into a folder for a machine without a network.

    python integration/ray/bundle.py FOLDER --python 3.12 && tar cJf ray.tar.xz -C FOLDER .

Left out are the jars, the dashboard's pages and the libraries on top of Ray: of a wheel of 76 MiB, an archive of 30 MiB
remains. ctxfix's own needs (wrapt, cuda-python, rich) are not in it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RAY = "2.60.0"
NEEDS = ("click", "filelock", "jsonschema", "msgpack", "packaging", "protobuf", "pyyaml", "requests")
LEFT_OUT = ("jars", "cpp", "dashboard/client", "rllib", "tune", "train", "serve", "data", "llm", "air", "tests")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}")
    options = parser.parse_args()
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    wheels = ["--only-binary=:all:", "--python-version", options.python]
    subprocess.run([*pip, "install", *wheels, "--target", str(options.folder), *NEEDS], check=True, timeout=600)
    with tempfile.TemporaryDirectory() as download:
        command = [*pip, "download", "--no-deps", *wheels, "-d", download, f"ray=={RAY}"]
        subprocess.run(command, check=True, timeout=600)
        with zipfile.ZipFile(next(Path(download).glob("*.whl"))) as wheel:
            for member in wheel.infolist():
                if not any(member.filename.startswith(f"ray/{name}/") for name in LEFT_OUT):
                    path = wheel.extract(member, options.folder)
                    Path(path).chmod(0o755)  # raylet and gcs_server are programs
    return 0


if __name__ == "__main__":
    sys.exit(main())
