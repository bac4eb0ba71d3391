# SPDX-License-Identifier: Apache-2.0
"""Where the rig's modules are."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "rig"))
