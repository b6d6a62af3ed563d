"""The documents tell the present: their code, links, words and versions are checked."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import atoll
from atoll import RunSettings
from atoll.settings.reference import references

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def relative(path: Path) -> str:
    """Return a document's name for a test's id."""
    return path.relative_to(ROOT).as_posix()


def glossary() -> list[tuple[str, str, str]]:
    """Return the rows of the glossary: say, meaning, never."""
    lines = (ROOT / "docs" / "glossary.md").read_text().splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("| ")]
    return [(say.strip(), what.strip(), never.strip()) for say, what, never in rows[1:]]


def snippets(document: Path) -> Iterator[tuple[Path, str]]:
    """Yield each included code block with the file it says it comes from."""
    pattern = r"<!-- from (\S+) -->\n```python\n(.*?)```"
    for source, code in re.findall(pattern, document.read_text(), flags=re.DOTALL):
        yield ROOT / source, code


def prose(document: Path) -> str:
    """Return a document without its code blocks and code words."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), flags=re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("name", ["README.md", "docs/quickstart.md"])
def test_code_in_a_document_is_code_of_an_example(name: str) -> None:
    """A Python block is literally part of the example it names."""
    text = (ROOT / name).read_text()
    found = list(snippets(ROOT / name))

    assert len(found) == text.count("```python") > 0
    for source, code in found:
        assert code in source.read_text()


def test_the_first_code_of_the_readme_is_short() -> None:
    """The README's loop is at most twelve lines."""
    (_, code), *_ = snippets(ROOT / "README.md")

    assert len(code.splitlines()) <= 12


@pytest.mark.torch
def test_the_example_of_the_readme_runs() -> None:
    """The README's script ends by itself, and both islands hold the same model."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "three_lines.py"],
        capture_output=True,
        text=True,
        check=True,
    )

    first, second = done.stdout.splitlines()
    assert first == second


def test_the_run_file_of_the_quickstart_is_valid() -> None:
    """The TOML block of the quickstart is accepted as it stands."""
    text = (ROOT / "docs" / "quickstart.md").read_text()
    (block,) = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL)

    assert RunSettings.from_dict(tomllib.loads(block)).run.name == "demo-run"


def test_every_setting_is_in_the_concepts() -> None:
    """The table of settings lists each key a run file may hold."""
    concepts = (ROOT / "docs" / "concepts.md").read_text()
    listed = {
        table: re.findall(r"`(\w+)`", keys)
        for table, keys in re.findall(r"^\| `\[(\w+)\]` \| (.*) \|$", concepts, re.M)
    }
    listed_keys = {f"{table}.{key}" for table, keys in listed.items() for key in keys}

    assert listed_keys == {reference.key for reference in references()}


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_links_resolve(document: Path) -> None:
    """Every link to a file or heading of this repository leads somewhere."""
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if link.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_changelog_begins_with_this_version() -> None:
    """The newest released entry of the changelog is the version one installs."""
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (\S+)", text, flags=re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]

    assert headings[-len(released) :] == released
    assert released[0] == atoll.__version__


def test_the_glossary_is_sorted_and_has_each_term_once() -> None:
    """A reader finds a word where the alphabet says, and one meaning for it."""
    terms = [say for say, _, _ in glossary()]

    assert terms == sorted(set(terms))
    assert all(what for _, what, _ in glossary())


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_a_line_holds_one_sentence(document: Path) -> None:
    """A change of one sentence is a change of one line."""
    crowded = [
        line
        for line in prose(document).splitlines()
        if not line.startswith("|") and re.search(r"[\w)]\. [A-Z]", line)
    ]

    assert crowded == []


def test_every_dependency_has_its_reason() -> None:
    """The page of dependencies lists what pyproject.toml installs, and no more."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {k: v for k, v in project["optional-dependencies"].items() if k != "dev"}
    wanted = {each for group in extras.values() for each in group}
    wanted |= set(project["dependencies"])
    installed = {re.split(r"[><=\[]", each)[0] for each in wanted} - {"atoll"}

    page = (ROOT / "docs" / "dependencies.md").read_text()
    told = re.findall(
        r"^\| (?:`[a-z, `-]+` \| )?`([\w-]+)` \|", page, flags=re.MULTILINE
    )
    assert set(told) == installed
