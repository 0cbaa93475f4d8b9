"""Hooks of the documentation site (`mkdocs build`): the README is its first page; no link leaves it for a source."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}  # of the root
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#]+)(#[^)]*)?\)")
_IN_SITE = re.compile(r"https?:|mailto:|[\w/-]+\.(md|svg|png)$")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the repository's root."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=Path(source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files that are no pages, such as sources, by their texts."""
    if page.file.src_uri in PAGES.values():
        markdown = markdown.replace("](docs/", "](").replace("(README.md", "(index.md")
    else:
        markdown = re.sub(r"\]\((?:\.\./)+(README|CONTRIBUTING|CHANGELOG)\.md", _of_root, markdown)
    return _LINK.sub(lambda link: link[0] if _IN_SITE.match(link[2]) else link[1], markdown)


def _of_root(link: re.Match[str]) -> str:
    above = "../" * (link[0].count("../") - 1)
    return f"]({above}{PAGES[link[1] + '.md']}"
