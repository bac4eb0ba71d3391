# SPDX-License-Identifier: Apache-2.0
"""Put first on PYTHONPATH by ``ctxfix run``: activates ctxfix, then runs the sitecustomize that was there.

Any Python may meet this file, however old, so it keeps to syntax that all of them read.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
_home = os.path.dirname(os.path.dirname(_here))

_found = "ctxfix" in sys.modules  # its own start-up file may have run
try:
    if sys.version_info < (3, 10):  # noqa: UP036
        raise ImportError("it needs Python 3.10 or later")
    # ctxfix may live in another environment than this interpreter. That folder is on the path while the
    # package is found, and no longer: nothing else of it may reach the program. The package finds its own
    # modules by itself.
    sys.path.insert(0, _home)
    try:
        import ctxfix
    finally:
        sys.path.remove(_home)
    if not _found:
        ctxfix._startup.started_by = "ctxfix run"
except (Exception, SystemExit) as _error:
    sys.stderr.write(
        "ctxfix: not active in "
        + str(sys.executable)
        + " (Python "
        + sys.version.split()[0]
        + "): "
        + type(_error).__name__
        + ": "
        + str(_error)
        + "\n"
    )

# The search for the program's own sitecustomize is Python's, with this folder taken out.
sys.path[:] = [_entry for _entry in sys.path if os.path.abspath(_entry) != _here]
_me = sys.modules.pop(__name__, None)
try:
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
except ImportError as _error:
    # Python 2 has no `name` there.
    if (getattr(_error, "name", None) or str(_error)) not in (
        "sitecustomize",
        "No module named sitecustomize",
    ):
        raise
finally:
    # The import system looks for a module of this name when this file ends.
    if _me is not None:
        sys.modules.setdefault(__name__, _me)
