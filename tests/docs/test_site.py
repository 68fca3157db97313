"""The site: every page in it, every link of every page, and nothing that needs a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading_of_it(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


def anchors(page):
    """The names that headings of a page are linked by."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def test_every_page_is_in_the_sites_menu_and_in_the_index():
    menu, index = (ROOT / "mkdocs.yml").read_text(), (ROOT / "docs" / "index.md").read_text()
    for page in PAGES[1:]:
        assert f"- {page.name}\n" in menu, page.name
        assert page.name == "index.md" or f"]({page.name})" in index, page.name


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return folder


def test_the_site_loads_nothing_from_a_network(site):
    pages = list(site.glob("*.html"))
    assert len(pages) >= len(PAGES) - 1
    for page in pages:
        loaded = re.findall(
            r"<(?:script|img)[^>]*src=\"?([^\">\s]+)|<link[^>]*stylesheet[^>]*href=\"?([^\">\s]+)", page.read_text()
        )
        for target in filter(None, (part for pair in loaded for part in pair)):
            assert not target.startswith(("http:", "https:", "//")), f"{page.name}: {target}"


def test_the_reference_shows_examples_as_code(site):
    page = (site / "api.html").read_text()
    assert "StandardizedTransformer" in page
    assert 'class="gp">&gt;&gt;&gt;' in page
    assert "<blockquote>" not in page
