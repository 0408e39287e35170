import re
from pathlib import Path

import pytest

from dpprof.spec import registry

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "config" / "README.md"]
DOCS += sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_links_and_pictures_exist(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", document.read_text())
    local = [target for target in targets if "://" not in target]

    assert [t for t in local if not (document.parent / t).exists()] == []


def test_documented_names_are_the_declared_ones() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    for group in ("models", "methods", "instruments", "targets"):
        for name in registry.names(group):
            assert f"| `{name}` |" in text


def test_code_in_the_guide_to_plugins_is_the_examples() -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", text, flags=re.DOTALL)
    example = ROOT / "tests" / "example_plugin"
    files = [path.read_text() for path in example.rglob("*") if path.suffix in (".py", ".toml")]

    assert len(blocks) == 4
    assert [block for block in blocks if not any(block in file for file in files)] == []
