# SPDX-License-Identifier: Apache-2.0
"""``python -m ctxfix``: the command line where its script is not on PATH."""

import sys

from ctxfix.cli import main

sys.exit(main())
