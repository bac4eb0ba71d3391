# SPDX-License-Identifier: Apache-2.0
"""How Sphinx builds the site: `make docs`, into build/site.

The pages are plain Markdown whose links work on GitHub too, so the source folder is the repository itself: a link to
another README is a page of the site, a link to a source file is that file. Nothing is fetched, at building or reading.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

import ctxfix

project = "ctxfix"
author = "the ctxfix authors"
version = release = ctxfix.__version__
html_title = f"ctxfix {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "integration/*/README.md", "benchmarks/README.md"]
include_patterns += ["README.md", "CHANGELOG.md", "SECURITY.md"]
exclude_patterns = [".*", "**/__pycache__", "build", "dist"]

html_theme = "furo"
templates_path = ["templates"]
html_additional_pages = {"index": "to-docs.html"}  # the front page is docs/index.html, as in the repository
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
smartquotes_action = "D"  # dashes only: quoted lines are what a program says

myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
# What does not resolve is an error (make docs: -W), but these are not our names, and nothing is asked of the network.
nitpick_ignore_regex = [("py:.*", r"(argparse|collections|contextlib|pytest|types)\..*")]

CONTENTS: dict[str, list[str]] = {
    "Understand": ["how-it-works", "verify", "troubleshooting", "security"],
    "Your host": ["SGLang <sglang>", "vLLM <vllm>", "Ray <ray>", "nixl", "Engines <engines>", "custom-host"],
    "Reference": ["configuration", "api"],
}
DOCS = Path(__file__).parent
ROOT = DOCS.parent


def _contents() -> str:
    """The contents: the named pages, then whatever else there is."""
    named = {re.sub(r".*<(.*)>", r"\1", page) for pages in CONTENTS.values() for page in pages} | {"index"}
    more = sorted(page.stem for page in DOCS.glob("*.md") if page.stem not in named)
    readmes = [*ROOT.glob("benchmarks/README.md"), *sorted(ROOT.glob("integration/*/README.md"))]
    folders = [str(page.relative_to(ROOT).parent) for page in readmes]
    repository = ["README </README>", "Changelog </CHANGELOG>", "Reporting a vulnerability </SECURITY>"]
    repository += [f"{folder} </{folder}/README>" for folder in folders]
    sections = {**CONTENTS, "More": more, "Repository": repository}
    return "\n".join(
        "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"])
        for caption, pages in sections.items()
        if pages
    )


def _prepare(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the contents under the front page (on GitHub they would be in the way), and take links to folders off."""
    if docname == root_doc:
        source[0] += f"\n{_contents()}\n"

    def without_folder(link: re.Match[str]) -> str:
        target = ROOT.joinpath(docname).parent / link[2]
        return link[1] if target.is_dir() else link[0]

    source[0] = re.sub(r"\[([^][]+)\]\(([^)#:]+)\)", without_folder, source[0])


def _check(app: Sphinx, error: Exception | None) -> None:
    """No page may have a browser fetch something from elsewhere."""
    for page in [] if error else Path(app.outdir).rglob("*.html"):
        fetched = re.search(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^>]*>', page.read_text())
        if fetched:
            raise ExtensionError(f"{page} has a browser fetch {fetched[0]}")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _prepare)
    app.connect("build-finished", _check)
