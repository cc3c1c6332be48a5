"""The documents keep to the facts: links lead somewhere, examples parse, mesh files load."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from rannc_jax.config import load_cluster, load_device

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def blocks(document: Path, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", document.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        assert "://" in target or (document.parent / target).exists(), target


def test_the_doors_of_the_readme_are_short_and_parse() -> None:
    doors = blocks(ROOT / "README.md", "python")
    assert len(doors) == 4
    for door in doors:
        ast.parse(door)
        assert len([line for line in door.splitlines() if line.strip()]) <= 12


def test_the_mesh_file_of_the_guide_loads() -> None:
    mesh, device = blocks(ROOT / "docs" / "how-to" / "mesh-file.md", "toml")
    assert load_cluster(tomllib.loads(mesh)).num_devices == 32
    assert load_device(tomllib.loads(device)).kind == "my board"


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    listed = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert listed
    documented = re.findall(r"^([a-z-]+):.* # ", makefile, re.MULTILINE)
    assert set(documented) | {"help"} == set(listed[1].split())
