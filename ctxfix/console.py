# SPDX-License-Identifier: Apache-2.0
"""Where the commands print tables: a terminal, a pipe or a file."""

from __future__ import annotations

import shutil

import rich.console


class Console(rich.console.Console):
    """Rich's own, but that a reader has gone is told to the caller: rich would exit with 1, which means much here."""

    def on_broken_pipe(self) -> None:
        """Called while the BrokenPipeError is handled."""
        raise


def console(elsewhere: int) -> Console:
    """Stdout, as wide as COLUMNS says or the terminal is; what is no terminal is ``elsewhere`` columns wide."""
    # A COLUMNS of 0, and a terminal that says it has no columns, say nothing.
    width = shutil.get_terminal_size((elsewhere, 24)).columns or elsewhere
    return Console(width=width)
