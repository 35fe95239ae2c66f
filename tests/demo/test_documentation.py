"""What the documentation lists must be what the code has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from flux_inductor.options import Options
from flux_inductor.passes.reasons import CODES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def rows(page: Path, columns: int) -> list[list[str]]:
    """The cells of all table rows of a Markdown page that begin with a code word and have so many columns."""
    lines = (line.strip() for line in page.read_text().splitlines())
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")
    ]
    return [row for row in cells if len(row) == columns]


def test_every_reason_is_documented_as_it_is() -> None:
    documented = {
        code.strip("`"): (meaning, strict == "yes")
        for code, meaning, strict, _ in rows(ROOT / "docs/report-reasons.md", columns=4)
    }
    assert documented == CODES


def test_every_reason_has_a_remedy() -> None:
    table = rows(ROOT / "docs/report-reasons.md", columns=4)
    assert [code for code, _, _, remedy in table if not remedy.endswith(".")] == []


def test_readme_lists_every_option() -> None:
    documented = {row[0].strip("`"): row[2].strip("`") for row in rows(ROOT / "README.md", columns=4)}
    defaults = {option.name: repr(option.default).replace("'", '"') for option in fields(Options)}
    assert documented == defaults


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []
