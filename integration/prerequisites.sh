#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# See that the few system packages which `make demo` and `make test` need are there: as root on a Debian-like system
# install what is missing, otherwise name it in one line to copy.
set -eu

python=${1:-python3}
missing=
need() { missing="$missing $1"; }

command -v "$python" >/dev/null || need python3
"$python" -c 'import ensurepip' 2>/dev/null || need python3-venv
command -v "${CC:-cc}" >/dev/null || need gcc
echo '#include <stdio.h>' | "${CC:-cc}" -E - >/dev/null 2>&1 || need libc6-dev
headers=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])' 2>/dev/null || true)
[ -e "$headers/Python.h" ] || need python3-dev # for ctxfix's C extension
echo '#include <rdma/fabric.h>' | "${CC:-cc}" -E - >/dev/null 2>&1 || need libfabric-dev
"$python" -c 'import ctypes; ctypes.CDLL("libhwloc.so.15")' 2>/dev/null || need libhwloc15
[ -n "$missing" ] || exit 0

line="apt-get update && apt-get install -y --no-install-recommends$missing"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing:$missing"
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends $missing; } >/dev/null || {
        echo "apt-get failed. Try: $line" >&2
        exit 1
    }
else
    echo "These system packages are missing:$missing. As root: $line" >&2
    exit 1
fi
