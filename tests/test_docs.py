# SPDX-License-Identifier: Apache-2.0
"""The documentation says what the code does: every variable, option, name and message is there, and no other."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from environments import ROOT

import ctxfix
from ctxfix import cli, counters, errors, pytest_plugin, settings
from ctxfix.evidence import fabric_log

DOCS = ROOT / "docs"
COMMANDS = ("status", "doctor", "run", "verify", "report")
FOLDERS = ("docs", "benchmarks", "integration")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
ELLIPSIS = "…"


def read(name: str) -> str:
    return (DOCS / name).read_text()


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def section(text: str, heading: str) -> str:
    """What stands under a heading of the second level."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"there is no section {heading!r}"
    return found[1]


# ---- variables, options, names ---------------------------------------------------------------------------------------


def test_variables() -> None:
    told = set(re.findall(r"^\| `(CTXFIX_\w+)`", section(read("configuration.md"), "Variables"), re.MULTILINE))
    assert told == {*settings._CHOICES, *settings._SWITCHES, *settings._PATHS}


@pytest.mark.parametrize("name", sorted(settings._CHOICES))
def test_values_of_variables(name: str) -> None:
    values = ", ".join(f"`{value}`" for value in settings._CHOICES[name])
    assert f"| `{name}` | {values} |" in read("configuration.md")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_variable_that_does_not_exist(page: Path) -> None:
    known = {*settings._CHOICES, *settings._SWITCHES, *settings._PATHS}
    told = set(re.findall(r"\bCTXFIX_[A-Z_]*[A-Z]\b", page.read_text()))
    assert {name for name in told - known if not name.startswith(("CTXFIX_TEST_", "CTXFIX_CUDART"))} == set()


def options_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    return set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_commands(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = re.findall(r"^\| `(--[a-z-]+)", section(read("configuration.md"), f"ctxfix {command}"), re.MULTILINE)
    assert (set(told), len(told)) == (options_of(command, capsys), len(set(told)))


def test_all_commands_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert tuple(re.findall(r"^    ([a-z]+)", capsys.readouterr().out, re.MULTILINE)) == COMMANDS


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_examples_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a page has the reader type, with options that the command knows."""
    lines = re.findall(r"^(?:    )?(?:\w+=\S+ )*ctxfix (?!run)(\w+)([^#\n]*)", page.read_text(), re.MULTILINE)
    for command, rest in lines:
        if command in COMMANDS:
            assert set(re.findall(r"(?<!\S)(--[a-z-]+)", rest)) <= options_of(command, capsys), (command, rest)


def test_reference_has_every_public_name() -> None:
    told = re.findall(r"^\.\. auto\w+:: ([\w.]+)", read("api.md"), re.MULTILINE)
    assert len(told) == len(set(told))
    assert {name.removeprefix("ctxfix.") for name in told if name.count(".") == 1} == set(ctxfix.__all__)
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert kinds == {name.rpartition(".")[2] for name in told if name.endswith("Error")}


def test_pytest_plugin_is_told() -> None:
    api, configuration = read("api.md"), section(read("configuration.md"), "pytest")
    for name, (_, value) in pytest_plugin._OPTIONS.items():
        option = f"--ctxfix-{name}{f' {value}' if value else ''}"
        assert f"| `{option}` | `ctxfix_{name.replace('-', '_')}` |" in configuration
    assert "`@pytest.mark.cuda_ipc(ranks=None, compared=False)`" in api
    assert "ctxfix.pytest_plugin.ctxfix_recorder" in api


def test_counters_are_told() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section(read("troubleshooting.md"), "What the counters say"), re.M)
    told = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(told) == sorted(counters.NAMES)


# ---- messages --------------------------------------------------------------------------------------------------------


def literals(node: ast.AST) -> str:
    """The literal text of a string expression, with an ellipsis for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literals(part) if isinstance(part, ast.Constant) else ELLIPSIS for part in node.values)
    return ELLIPSIS


def sources() -> Iterator[ast.AST]:
    for path in sorted((ROOT / "ctxfix").rglob("*.py")):
        yield from ast.walk(ast.parse(path.read_text()))


def pieces(text: str) -> list[str]:
    """What of a message is the same each time it is given."""
    return [stripped for piece in text.split(ELLIPSIS) if (stripped := piece.strip(" .,:;()"))]


def quoted(*headings: str) -> list[str]:
    """The lines that troubleshooting.md is keyed by, under these headings."""
    text = read("troubleshooting.md")
    return [line for h in headings for block in blocks(section(text, h), "text") for line in block.splitlines()]


OURS = "ctxfix's warnings", "Native part is off"
THEIRS = "libfabric's lines", "NIXL's lines"


def test_quoted_messages_are_given_by_the_code() -> None:
    """Each unvarying piece of each line of ours stands verbatim in some message of the source."""
    known = "\n".join(literals(node) for node in sources() if isinstance(node, (ast.Constant, ast.JoinedStr)))
    lines = quoted(*OURS)
    assert len(lines) > 25
    # What logs often puts "ctxfix: " in front of what it is given.
    absent = [(piece, line) for line in lines for piece in pieces(line.removeprefix("ctxfix: ")) if piece not in known]
    assert absent == []


def test_every_warning_is_in_troubleshooting() -> None:
    text = "\n".join(quoted(*OURS))
    warnings = [
        literals(node.args[1])
        for node in sources()
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "guard.warn_once"
    ]
    assert len(warnings) >= 11
    assert [piece for warning in warnings for piece in pieces(warning) if piece not in text] == []


@pytest.mark.parametrize("kind", sorted({*fabric_log._LIBFABRIC, *fabric_log._OTHERS} - {"shm_peer", "ucx_path"}))
def test_lines_that_ctxfix_knows_are_in_troubleshooting(kind: str) -> None:
    """shm_peer and ucx_path tell of no trouble."""
    pattern = {**fabric_log._LIBFABRIC, **fabric_log._OTHERS}[kind]
    assert any(pattern.search(re.sub(rf"(?<=: ){ELLIPSIS}$", "NAME", line.replace(f"device {ELLIPSIS}", "device 1")))
               for line in quoted(*THEIRS))  # fmt: skip


def test_reasons_of_verdicts_are_given_by_the_code() -> None:
    known = "\n".join(literals(node) for node in sources() if isinstance(node, (ast.Constant, ast.JoinedStr)))
    reasons = re.findall(r'^\| "(.+?)" \|', section(read("troubleshooting.md"), "What verify and report say"), re.M)
    assert len(reasons) > 8
    assert [reason for reason in reasons if reason not in known] == []


# ---- links, code, pictures -------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link in re.findall(r"\[[^][]*\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_blocks_compile(page: Path) -> None:
    for code in blocks(page.read_text(), "python"):
        compile(code, str(page), "exec")


def test_pictures_are_those_of_the_script() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures" / "draw.py"))["PICTURES"]
    assert {path.name for path in (DOCS / "pictures").glob("*.svg")} == set(drawn)
    for name, draw in drawn.items():
        assert (DOCS / "pictures" / name).read_text() == draw(), "run python docs/pictures/draw.py"
        assert f"pictures/{name})" in read("how-it-works.md")


# ---- commands to paste -----------------------------------------------------------------------------------------------

PASTED = [*PAGES, ROOT / "integration" / "sglang" / "launch.sh"]


@pytest.mark.parametrize("page", PASTED, ids=name_of)
def test_folders_of_records_do_not_depend_on_where_the_program_goes(page: Path) -> None:
    """A relative one is taken from where it imports NIXL, which may be after os.chdir."""
    folders = re.findall(r"\bCTXFIX_RECORD=([^\s`]+)", page.read_text())
    assert [folder for folder in folders if folder != "DIR" and not folder.startswith(("/", "$PWD/"))] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_folders_that_rsync_copies_into_are_made(page: Path) -> None:
    """It makes the last folder of a path, and no other."""
    copies = [line.strip() for line in page.read_text().splitlines() if re.search(r"\brsync .* all/", line)]
    assert [line for line in copies if not line.startswith("mkdir -p all && rsync")] == []
