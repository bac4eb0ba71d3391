# SPDX-License-Identifier: Apache-2.0
"""A judgement shown: as a table on the terminal, as JSON, as JUnit XML and as one HTML page that stands alone."""

from __future__ import annotations

import html as html_module
import json
import os
import stat
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ctxfix.errors import EvidenceError
from ctxfix.verify.verdict import Judgement, Path, Row, as_json

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {Path.CUDA_IPC: "green", Path.NIC: "green", Path.SAR: "red", Path.OTHER: "yellow", Path.UNPROVEN: "yellow"}
_MEANING = {
    Path.CUDA_IPC: "one copy, GPU to GPU",
    Path.NIC: "through the network device",
    Path.SAR: "in pieces through host memory",
    Path.OTHER: "another way, see below",
    Path.UNPROVEN: "not proven, see below",
}


def size(number: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 1000 or unit == "TB":
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError


def _contexts(row: Row) -> str:
    """In which context the posts were made."""
    return ", ".join(f"{number} {verdict}" for verdict, number in sorted(row.contexts.items())) or "–"


def _stray(row: Row) -> str:
    """GPUs with a context of either end and no memory."""
    if row.stray is None and row.peer_stray is None:
        return "?"
    gpus = [f"GPU {gpu}" for gpu in row.stray or []] + [f"GPU {gpu} (peer)" for gpu in row.peer_stray or []]
    return ", ".join(gpus) or "none"


def _time(row: Row) -> str:
    return "–" if row.mean_ms is None else f"{row.mean_ms:.2f} ms"


def _share(row: Row) -> str:
    return "–" if row.share is None else f"{row.share:.1%}" if row.share < 0.1 else f"{row.share:.0%}"


def _witness(row: Row) -> list[str]:
    return [row.witness] if row.witness else []


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        row.path.value,
        size(row.bytes),
        f"{row.posts:,} ({row.descriptors:,})",
        str(row.failures),
        _contexts(row),
        _stray(row),
        _time(row),
        _share(row),
    ]


_HEADS = ["direction", "path", "bytes", "posts (descr.)", "failures", "contexts", "stray", "mean time", "of limit"]


def printable(text: str) -> str:
    """Without what steers a terminal: names and logs come from anywhere."""
    return "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in text)


def table(judgement: Judgement, title: str = "") -> RenderableType:
    """The verdict as a table, with reasons and cures below."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def text(words: str, style: str = "") -> Text:
        return Text(printable(words), style)

    parts: list[RenderableType] = []
    if judgement.rows:
        shown = Table(
            box=box.SIMPLE_HEAD,
            title=text(title, "table.title") if title else None,
            title_justify="left",
            pad_edge=False,
        )
        for head in _HEADS:
            right = head in ("bytes", "posts (descr.)", "failures", "mean time", "of limit")
            shown.add_column(head, justify="right" if right else "left", no_wrap=head in ("direction", "path"))
        for row in judgement.rows:
            cells = [text(cell) for cell in _cells(row)]
            cells[1].stylize(_STYLES[row.path])
            if row.failures:
                cells[4].stylize("red")
            shown.add_row(*cells)
        parts.append(shown)
    for row in judgement.rows:
        if row.good and not (row.notes or row.advice):
            continue
        parts.append(text(f"{row.name}: {row.path.value}", _STYLES[row.path]))
        parts += [text(f"  {reason}") for reason in [*(() if row.good else row.reasons), *row.notes]]
        parts += [text(f"  ⇒ {cure}", "bold") for cure in row.advice]
    # Each process speaks in several rows.
    parts += [text(words, "dim") for words in dict.fromkeys(row.witness for row in judgement.rows if row.witness)]
    parts += [text(judgement.nvlink, "dim")] if judgement.nvlink else []
    parts += [text(f"! {problem}", "yellow") for problem in judgement.problems]
    parts.append(text(judgement.reason, "green" if judgement.code == 0 else "red"))
    return Group(*parts)


def as_text(judgement: Judgement) -> str:
    """The judgement as JSON."""
    return json.dumps(as_json(judgement), indent=2) + "\n"


def junit(judgement: Judgement) -> str:
    """The judgement as JUnit XML: a test case for each direction."""
    bad = [row for row in judgement.rows if not row.good]
    errors = [] if judgement.code != 2 else [judgement.reason]
    whole = judgement.code == 1 and not bad  # all rows are good, and the run is not
    suite = ET.Element(
        "testsuite",
        name="ctxfix",
        tests=str(len(judgement.rows) + len(errors) + whole),
        failures=str(len(bad) + whole),
        errors=str(len(errors)),
    )
    for row in judgement.rows:
        seconds = f"{(row.mean_ms or 0) / 1000:.6f}"
        case = ET.SubElement(suite, "testcase", classname="ctxfix.path", name=_plain(row.name), time=seconds)
        text = _plain("\n".join([*row.reasons, *_witness(row), *row.notes, *(f"=> {cure}" for cure in row.advice)]))
        if row.good:
            ET.SubElement(case, "system-out").text = text
        else:
            ET.SubElement(case, "failure", message=row.path.value, type=row.path.value).text = text
    for reason in errors:
        case = ET.SubElement(suite, "testcase", classname="ctxfix.path", name="run")
        ET.SubElement(case, "error", message=_plain(reason))
    if whole:
        case = ET.SubElement(suite, "testcase", classname="ctxfix.path", name="all ranks")
        ET.SubElement(case, "failure", message=_plain(judgement.reason))
    ET.indent(suite)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suite, encoding="unicode") + "\n"


def _plain(text: str) -> str:
    """Without what XML cannot hold: logs are laced with it."""
    return "".join(
        c if c in "\t\n" or " " <= c <= "\ud7ff" or "\ue000" <= c <= "\ufffd" or c > "\uffff" else "?" for c in text
    )


def write(path: str, text: str) -> None:
    """Write ``text`` to ``path``; raises EvidenceError if that fails, or another user laid a file or link there.

    Such a file would be that user's to change; such a link would choose what is overwritten.
    """
    try:
        try:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            there = os.lstat(path)
            if there.st_uid not in (0, os.geteuid()) and (stat.S_ISREG(there.st_mode) or stat.S_ISLNK(there.st_mode)):
                raise EvidenceError(f"{path} is there and belongs to another user: not written") from None
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        with open(opened, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as error:
        raise EvidenceError(f"{path} cannot be written: {error.strerror or error}") from error


# ---- HTML ------------------------------------------------------------------------------------------------------------

_COLOURS = {
    Path.CUDA_IPC: "#1a7f37",
    Path.NIC: "#0969da",
    Path.SAR: "#cf222e",
    Path.OTHER: "#9a6700",
    Path.UNPROVEN: "#6e7781",
}
_CSS = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1f2328; --line: #d0d7de; --soft: #f6f8fa; --dim: #59636e }
@media (prefers-color-scheme: dark) {
  :root { --bg: #0d1117; --fg: #e6edf3; --line: #30363d; --soft: #161b22; --dim: #9198a1 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.sum { font-size: 1.05rem; padding: .6rem .9rem; border-left: 4px solid; background: var(--soft); margin: 1rem 0 }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--dim); font-weight: 600; font-size: .85rem } td.n, th.n { text-align: right }
.path { color: #fff; border-radius: 1rem; padding: .1rem .6rem; font-size: .8rem; font-weight: 600 }
.why { border: 1px solid var(--line); border-radius: 6px; padding: .6rem 1rem; margin: .6rem 0;
  overflow-wrap: anywhere }
.why p { margin: .2rem 0 } .cure { font-weight: 600 } .dim { color: var(--dim) }
svg { max-width: 100%; height: auto } svg text { font: 13px system-ui, sans-serif; fill: var(--fg) }
svg .box { fill: var(--soft); stroke: var(--line) } svg .dim { fill: var(--dim); font-size: 11px }
"""


def html(judgement: Judgement, title: str = "ctxfix report") -> str:
    """The judgement as one page that needs nothing from anywhere."""
    e = html_module.escape
    colour = _COLOURS[Path.CUDA_IPC] if judgement.code == 0 else _COLOURS[Path.SAR]
    numeric = {"bytes", "posts (descr.)", "failures", "mean time", "of limit"}
    heads = "".join(f'<th class="{"n" if head in numeric else ""}">{e(head)}</th>' for head in _HEADS)
    rows = "".join(_html_row(row, numeric) for row in judgement.rows)
    reasons = "".join(_html_reasons(row) for row in judgement.rows)
    problems = "".join(f'<div class="why"><p>{e(problem)}</p></div>' for problem in judgement.problems)
    legend = " ".join(
        f'<span class="path" style="background:{_COLOURS[path]}">{path.value}</span> <span class="dim">{e(text)}</span>'
        for path, text in _MEANING.items()
        if any(row.path is path for row in judgement.rows)
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{e(title)}</title><style>{_CSS}</style></head><body>
<h1>{e(title)}</h1>
<div class="sum" style="border-color:{colour}">{e(judgement.reason)}</div>
<p>{legend}</p>
{_svg(judgement.rows)}
<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>
{f"<h2>Why, and what to do</h2>{reasons}" if reasons else ""}
{f"<p>{e(judgement.nvlink)}</p>" if judgement.nvlink else ""}
{f"<h2>About the records</h2>{problems}" if problems else ""}
</body></html>
"""


def _html_row(row: Row, numeric: set[str]) -> str:
    e = html_module.escape
    cells = []
    for head, cell in zip(_HEADS, _cells(row), strict=True):
        text = (
            f'<span class="path" style="background:{_COLOURS[row.path]}">{e(cell)}</span>'
            if head == "path"
            else e(cell)
        )
        cells.append(f'<td class="{"n" if head in numeric else ""}">{text}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _html_reasons(row: Row) -> str:
    e = html_module.escape
    lines = [f"<p><b>{e(row.name)}</b> – {row.path.value}</p>"]
    lines += [f"<p>{e(reason)}</p>" for reason in [*row.reasons, *_witness(row), *row.notes]]
    lines += [f'<p class="cure">⇒ {e(cure)}</p>' for cure in row.advice]
    return f'<div class="why">{"".join(lines)}</div>'


def _svg(rows: Iterable[Row]) -> str:
    """Posters on the left, peers on the right, and between them the way the bytes took: SAR dips into host memory."""
    e = html_module.escape
    drawn = [row for row in rows if row.posts][:64]
    if not drawn:
        return ""
    step, top, width = 58, 16, 720
    height = top + step * len(drawn)
    parts = []
    for index, row in enumerate(drawn):
        y, colour = top + index * step, _COLOURS[row.path]
        left, _, right = row.name.partition(" → ")
        where = f"GPU {row.device} · {row.host}" if row.device is not None else row.host
        parts.append(
            f'<rect class="box" x="8" y="{y}" width="170" height="42" rx="6"/>'
            f'<text x="18" y="{y + 18}">{e(left)}</text><text class="dim" x="18" y="{y + 34}">{e(where[:26])}</text>'
            f'<rect class="box" x="{width - 178}" y="{y}" width="170" height="42" rx="6"/>'
            f'<text x="{width - 168}" y="{y + 26}">{e(right or "?")}</text>'
        )
        middle, x1, x2 = y + 21, 178, width - 178
        dashes = ' stroke-dasharray="6 5"' if row.path in (Path.UNPROVEN, Path.OTHER) else ""
        line = f'fill="none" stroke="{colour}" stroke-width="3"{dashes}'
        if row.path is Path.SAR:
            parts.append(
                f'<path {line} d="M{x1} {middle - 8} H290 L310 {middle + 8} H410 L430 {middle - 8} H{x2 - 8}"/>'
                f'<text class="dim" x="322" y="{middle + 22}">host memory</text>'
            )
            tip = middle - 8
        else:
            parts.append(f'<path {line} d="M{x1} {middle} H{x2 - 8}"/>')
            tip = middle
        parts.append(f'<path fill="{colour}" d="M{x2} {tip} l-11 -6 v12 z"/>')
        label = f"{row.path.value} · {size(row.bytes)}" + (f" · {_time(row)}" if row.mean_ms is not None else "")
        parts.append(f'<text x="{width / 2}" y="{middle - 12}" text-anchor="middle">{e(label)}</text>')
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="ranks and paths">{body}</svg>'


def default_title(folder: str) -> str:
    """What a report on ``folder`` is called."""
    return f"ctxfix report: {os.path.basename(os.path.abspath(folder))}"
