# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of how-it-works.md: `python docs/pictures/draw.py` writes the SVG files beside it.

Each picture brings its own background and follows the reader's colour scheme, so it can be read wherever it is shown.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH = 760
STYLE = """
  svg { --bg: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --box: #f6f8fa;
        --good: #1a7f37; --goodbox: #dafbe1; --bad: #cf222e; --badbox: #ffebe9; --off: #59636e; --offbox: #eaeef2;
        --py: #0969da; --pybox: #ddf4ff; --c: #8250df; --cbox: #fbefff; }
  @media (prefers-color-scheme: dark) {
    svg { --bg: #0d1117; --ink: #f0f6fc; --soft: #9198a1; --line: #3d444d; --box: #161b22;
          --good: #3fb950; --goodbox: #12261e; --bad: #f85149; --badbox: #2d1517; --off: #9198a1; --offbox: #262c36;
          --py: #58a6ff; --pybox: #12233a; --c: #bc8cff; --cbox: #251a3d; }
  }
  text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--ink); }
  .small { font-size: 11.5px; }
  .soft { fill: var(--soft); }
  .bold { font-weight: 600; }
  .title { font-size: 15px; font-weight: 600; }
  .code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; font-weight: 600; }
  .over { stroke: var(--bg); stroke-width: 5px; paint-order: stroke; }
"""


class Picture:
    """An SVG under construction; coordinates in pixels from the upper left."""

    def __init__(self, title: str, about: str) -> None:
        self._about = f"<title>{escape(title)}</title>\n<desc>{escape(about)}</desc>"
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, colour: str = "", dashed: bool = False) -> None:
        """A rectangle; ``colour`` names a pair of the style: its line and its ground."""
        fill, line = (f"var(--{colour}box)", f"var(--{colour})") if colour else ("var(--box)", "var(--line)")
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" stroke="{line}"{dash}/>'
        )

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "start", colour: str = "") -> None:
        """One line of text with its base line at ``y``."""
        fill = f' style="fill: var(--{colour})"' if colour else ""
        self._parts.append(f'<text x="{x}" y="{y}" class="{style}" text-anchor="{anchor}"{fill}>{escape(words)}</text>')

    def lines(self, x: float, y: float, words: list[str], style: str = "small soft", step: float = 16) -> None:
        """Several lines of text, the first at ``y``."""
        for number, line in enumerate(words):
            self.text(x, y + number * step, line, style)

    def chip(self, x: float, y: float, words: str, colour: str, width: float) -> None:
        """A small label, centred on ``x``."""
        self.box(x - width / 2, y, width, 20, colour)
        self.text(x, y + 14, words, "small bold", "middle", colour)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str = "ink", width: float = 1.5) -> None:
        """A straight arrow."""
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        dx, dy = (x2 - x1) / length, (y2 - y1) / length
        size = 4 + 2 * width
        bx, by = x2 - dx * size, y2 - dy * size
        px, py = -dy * size * 0.5, dx * size * 0.5
        self._parts.append(
            f'<path d="M{x1:.1f} {y1:.1f}L{bx:.1f} {by:.1f}" stroke="var(--{colour})" stroke-width="{width}"/>'
            f'<path d="M{x2:.1f} {y2:.1f}L{bx + px:.1f} {by + py:.1f}L{bx - px:.1f} {by - py:.1f}Z" '
            f'fill="var(--{colour})"/>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False, colour: str = "line") -> None:
        """A straight line."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(f'<path d="M{x1} {y1}L{x2} {y2}" stroke="var(--{colour})"{dash}/>')

    def svg(self, height: float) -> str:
        """The whole picture."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img">\n{self._about}\n<style>{STYLE}</style>\n'
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="var(--bg)" '
            'stroke="var(--line)"/>\n' + "\n".join(self._parts) + "\n</svg>\n"
        )


def who_copies() -> str:
    """Which thread copies in which context: NIXL 1.1.0 and 1.4.0 as shipped, and with ctxfix."""
    picture = Picture(
        "Who copies, on which thread, in which context",
        "A rank whose GPU is number 1 sends within one node. As shipped, NIXL 1.1.0 posts in no context and the data "
        "goes through host memory; NIXL 1.4.0 posts in the right context, but the receiver's thread works through "
        "GPU 0; with ctxfix both threads are in GPU 1's context and the receiver makes one copy.",
    )

    def panel(
        top: float,
        title: str,
        time: str,
        sender: tuple[str, str],
        receiver: tuple[str, str],
        said: list[str],
        way: list[str],
        copies: list[str],
        host: bool,
        good: bool,
    ) -> None:
        colour = "good" if good else "bad"
        picture.text(20, top + 18, title, "title")
        picture.text(740, top + 18, time, "bold", "end", colour)
        for x, process, thread, (words, state), told in (
            (20, "sender", "thread that posts", sender, said),
            (500, "receiver", "NIXL's progress thread", receiver, copies),
        ):
            picture.box(x, top + 30, 240, 126)
            picture.text(x + 12, top + 52, process, "small soft")
            picture.chip(x + 170, top + 38, words, state, 120)
            picture.text(x + 12, top + 76, thread, "bold")
            picture.lines(x + 12, top + 95, told)
            picture.text(x + 120, top + 146, "memory on GPU 1", "small", "middle")
        picture.box(290, top + 30, 180, 84)
        picture.text(380, top + 52, "libfabric: efa → shm", "small soft", "middle")
        for number, line in enumerate(way):
            picture.text(380, top + 76 + 19 * number, line, "small soft" if number else "bold", "middle")
        picture.arrow(260, top + 72, 290, top + 72)
        picture.arrow(470, top + 72, 500, top + 72)
        y = top + 142
        if host:
            picture.arrow(200, y, 292, y, colour, 3)
            picture.box(294, y - 13, 172, 26, "bad")
            picture.text(380, y + 4, "host memory, 32 KiB pieces", "small", "middle")
            picture.arrow(468, y, 558, y, colour, 3)
        else:
            picture.arrow(200, y, 558, y, colour, 3)

    panel(
        10, "NIXL 1.1.0 as shipped", "2 GiB in 1346 ms",
        ("no context", "bad"), ("GPU 0's context", "bad"),
        ["cuMemGetAddressRange: 201,", "then 500 in GPU 0's context"],
        ["no IPC handle: SAR", "one line in its log, no error"],
        ["copies out of host memory", "through GPU 0: stray context"],
        host=True, good=False,
    )  # fmt: skip
    panel(
        192, "NIXL 1.4.0 as shipped", "2 GiB in 38.5 ms",
        ("GPU 1's context", "good"), ("GPU 0's context", "bad"),
        ["NIXL sets the context that it", "recorded, and leaves it set"],
        ["IPC handle", "in shm's command queue"],
        ["opens the handle and copies", "through GPU 0: stray context"],
        host=False, good=False,
    )  # fmt: skip
    panel(
        374, "either NIXL, with ctxfix", "2 GiB in 1.1 ms",
        ("GPU 1's context", "good"), ("GPU 1's context", "good"),
        ["by the hook on nixl_agent;", "the caller's own is put back"],
        ["IPC handle", "in shm's command queue"],
        ["in it since it started; one copy,", "whole before it is reported"],
        host=False, good=True,
    )  # fmt: skip
    note = "Both ends are of rank 1, on GPU 1 of two H200; times as in the README. Labels: the thread's context."
    picture.text(20, 556, note, "small soft")
    return picture.svg(570)


def lifeline() -> str:
    """From the registration of memory to its end."""
    picture = Picture(
        "The life of a registration and of a transfer",
        "register_memory asks the driver for the owner of each range and enters it into the registry; initialize_xfer "
        "looks the owner up once; transfer and check_xfer_state make its context current and put the caller's back; "
        "release and deregister_memory forget.",
    )
    columns = {"app": 70, "hook": 235, "registry": 395, "driver": 545, "nixl": 690}
    names = {
        "app": "application",
        "hook": "ctxfix's hook",
        "registry": "registry",
        "driver": "CUDA driver",
        "nixl": "NIXL",
    }
    end = 650
    for key, x in columns.items():
        picture.box(x - 60, 14, 120, 28, "py" if key in ("hook", "registry") else "")
        picture.text(x, 33, names[key], "bold", "middle")
        picture.line(x, 42, x, end, dashed=True)
    y = 34.0

    def call(target: str, words: str, colour: str = "ink") -> None:
        nonlocal y
        y += 29
        picture.arrow(columns["hook"], y, columns[target], y, colour)
        picture.text(columns["hook"] + 8, y - 6, words, "small over")

    def method(name: str, often: str) -> None:
        nonlocal y
        if y > 40:
            y += 14
            picture.line(14, y, WIDTH - 14, y)
        y += 34
        picture.arrow(columns["app"], y, columns["hook"], y)
        picture.text(columns["app"] + 8, y - 7, name, "code over")
        picture.text(columns["hook"] + 8, y - 7, often, "small soft over")

    method("register_memory", "for each range:")
    call("driver", "which context owns the address? which allocation?")
    call("nixl", "the call itself, in that context; the agent's own threads go there, too")
    call("registry", "range → owner")
    method("initialize_xfer", "once for each transfer:")
    call("registry", "whose is the address?")
    call("driver", "is it still the same allocation?")
    call("nixl", "the call itself; handle → owner is kept")
    method("transfer", "each post; check_xfer_state and the other polls do the same:")
    call("driver", "current? if another one, or none: set the owner's", "good")
    call("nixl", "the post itself: libfabric finds the memory, makes the handle", "good")
    call("driver", "put the caller's back, whatever NIXL left", "good")
    method("release", "the handle is forgotten first: NIXL gives its number to another one")
    call("nixl", "the call itself")
    call("driver", "the first time: a context where we have no memory?")
    method("deregister_memory", "for each range:")
    call("nixl", "the call itself, in the owner's context")
    call("registry", "forget the range")
    return picture.svg(end + 14)


def layers() -> str:
    """Which layer guards what."""
    picture = Picture(
        "Which layer guards what",
        "On the sender: a hook on new Python threads, hooks on nixl_agent's methods, and libfabric's CUDA calls bound "
        "by the extension. On the receiver, where no Python runs: native threads that start in the right context, "
        "libfabric's CUDA calls bound, and copies that have ended when they are reported.",
    )
    for x, title in ((20, "sender's process"), (390, "receiver's process")):
        picture.box(x, 14, 350, 330)
        picture.text(x + 14, 36, title, "title")

    def layer(x: float, y: float, name: str, about: str) -> None:
        picture.box(x + 14, y, 132, 46)
        picture.text(x + 80, y + 20, name, "bold", "middle")
        picture.text(x + 80, y + 36, about, "small soft", "middle")

    def guard(x: float, y: float, colour: str, words: list[str]) -> None:
        picture.box(x + 166, y, 172, 46, colour)
        picture.text(x + 176, y + 19, words[0], "small bold", colour=colour)
        picture.text(x + 176, y + 36, words[1], "small")
        picture.arrow(x + 166, y + 23, x + 148, y + 23, colour)

    for x, names in (
        (
            20,
            [("Python thread", "posts"), ("nixl_agent", "Python"), ("NIXL's plugin", "C++"), ("libfabric", "efa, shm")],
        ),
        (
            390,
            [
                ("Python thread", "polls"),
                ("nixl_agent", "Python"),
                ("progress thread", "NIXL, C++"),
                ("libfabric", "shm copies"),
            ],
        ),
    ):
        for number, (name, about) in enumerate(names):
            layer(x, 50 + 60 * number, name, about)
            if not (x == 390 and number == 1):
                picture.arrow(x + 80, 96 + 60 * number, x + 80, 110 + 60 * number)
        picture.box(x + 14, 290, 132, 40)
        picture.text(x + 80, 315, "CUDA driver", "bold", "middle")

    guard(20, 50, "py", ["starts bound", "threads.py"])
    guard(20, 110, "py", ["context by address", "patches/nixl.py"])
    guard(20, 170, "c", ["held against NIXL's own", "cudaSetDevice"])
    guard(20, 230, "c", ["bound by pointer,", "and counted"])
    guard(390, 50, "py", ["starts bound", "threads.py"])
    guard(390, 110, "py", ["context of its memory", "patches/nixl.py"])
    guard(390, 170, "c", ["starts in, or follows,", "the agent's context"])
    guard(390, 230, "c", ["bound, counted, and", "whole when reported"])
    picture.chip(64, 356, "Python", "py", 88)
    picture.text(118, 370, "needs no compiler; binds whatever goes through Python: the sender", "small")
    picture.chip(64, 382, "extension", "c", 88)
    picture.text(118, 396, "serves the receiver, threads that no Python sees, and ctxfix verify", "small")
    return picture.svg(412)


PICTURES = {"who-copies.svg": who_copies, "lifeline.svg": lifeline, "layers.svg": layers}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw())
