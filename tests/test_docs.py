import csv
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml

from dpprof.experiments.config import registry
from dpprof.experiments.config.datasheets import list_targets

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ENTRY = ("README.md", "CONTRIBUTING.md", "config/README.md", "perf/README.md")
PAGES = [*(ROOT / page for page in ENTRY), *sorted(DOCS.rglob("*.md"))]
EXAMPLE = ROOT / "tests" / "example_plugin"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> list[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return [re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain]


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            yield link, (page.parent / file if file else page).resolve(), anchor


@each_page
def test_links_and_anchors_lead_somewhere(page) -> None:
    dead = [link for link, target, _ in links(page) if not target.exists()]
    assert dead == []

    lost = [
        link for link, target, anchor in links(page) if anchor and anchor not in anchors(target)
    ]
    assert lost == []


def test_the_gallery_has_every_figure_with_its_section() -> None:
    script = runpy.run_path(str(ROOT / "workflow" / "scripts" / "gallery.py"))

    assert (DOCS / "gallery.md").read_text(encoding="utf-8") == script["write_page"]()


@each_page
def test_paths_that_are_named_exist(page) -> None:
    folders = "src|workflow|config|tests|docs|envs|profiles"
    named = re.findall(
        rf"(?<![\w/.-])((?:{folders})/[\w./-]*\w|perf/\w+\.(?:md|py))", page.read_text()
    )
    assert [path for path in named if not (ROOT / path).exists()] == []


@each_page
def test_modules_that_are_named_exist(page) -> None:
    missing = [
        name
        for name in re.findall(r"(?<![\w./-])dpprof(?:\.\w+)+", page.read_text())
        if not is_there(name)
    ]
    assert missing == []


def is_there(name: str) -> bool:
    """Tell whether a dotted name is a module, what one defines, or a group of entry points."""
    _, *parts = name.split(".")
    if len(parts) == 1 and parts[0] in get_args(registry.Group):
        return True
    for depth in range(len(parts), -1, -1):
        module = ROOT.joinpath("src", "dpprof", *parts[:depth])
        files = [one for one in (module.with_suffix(".py"), module / "__init__.py") if one.exists()]
        if files:
            rest = parts[depth:]
            return not rest or re.search(rf"\b{rest[0]}\b", files[0].read_text()) is not None
    return False


def test_every_page_is_in_the_index() -> None:
    for index in (DOCS / "README.md", DOCS / "numbers" / "README.md"):
        reached = {target for _, target, _ in links(index)}
        beside = {page.resolve() for page in index.parent.glob("*.md")} - {index.resolve()}
        assert beside - reached == set()
    reached = {target for _, target, _ in links(DOCS / "README.md")}
    assert {page.resolve() for page in (DOCS / "how-to").glob("*.md")} - reached == set()


def read_tree(text: str) -> dict[str, str]:
    """Read an annotated tree: paths of files and folders, each with what is said of it."""
    found, folders = {}, [""]
    for line in text.splitlines():
        indent, name, said = re.fullmatch(r"( *)(\S+)(?: {2,}(\S.*))?", line).groups()
        folders[len(indent) // 2 :] = [name]
        found["".join(folders)] = said
    return found


def test_the_trees_of_the_architecture_list_what_exists() -> None:
    text = (DOCS / "architecture.md").read_text()
    package, workflow = re.findall(r"^```text\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    folders, files = read_tree(package), read_tree(workflow)
    modules = (ROOT / "src" / "dpprof").rglob("*.py")
    rules = [p for p in (ROOT / "workflow").rglob("*.*") if "__pycache__" not in p.parts]
    snakefiles = [ROOT / "Snakefile", ROOT / "workflow" / "Snakefile"]

    assert set(folders) - {"src/dpprof/predict/step_time/tables/"} == {
        f"{p.parent.relative_to(ROOT)}/" for p in modules
    }
    assert {path for path in files if not path.endswith("/")} == {
        str(p.relative_to(ROOT)) for p in [*snakefiles, *rules]
    }
    assert [path for path, said in folders.items() if not said] == ["src/dpprof/"]
    assert [path for path, said in files.items() if not (said or path.endswith("/"))] == []


def test_how_it_works_names_what_is_in_each_file_and_about_how_long_it_is() -> None:
    text = (DOCS / "how-to" / "how-it-works.md").read_text()
    steps = re.findall(
        r"^\d+\. \*\*`(src/\S+)`\*\* \((\d+) lines\): (.*?)(?=^\d+\.|^\S)",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )

    assert len(steps) == 10
    for file, lines, said in steps:
        code = (ROOT / file).read_text()
        assert len(code.splitlines()) == pytest.approx(int(lines), rel=0.2), file
        names = re.findall(r"`(\w+)`", said)
        assert [one for one in names if not re.search(rf"\b{one}\b", code)] == []


def test_the_groups_and_the_import_order_of_the_architecture_are_the_contract() -> None:
    contract = (ROOT / "pyproject.toml").read_text().partition("layers = [")[2].partition("]")[0]
    layers = [layer.split(" | ") for layer in re.findall(r'"(.+?)"', contract)]
    text = (DOCS / "architecture.md").read_text()
    (order,) = re.findall(r"^`__main__` →[^.]+?\n\n", text, flags=re.MULTILINE)
    groups = re.findall(r"^\* \*\*[\w ]+\*\* \((.+?)\):", text, flags=re.MULTILINE)

    assert [re.findall(r"`(\w+)`", layer) for layer in order.split("→")] == layers
    assert sorted(re.findall(r"`(\w+)`", " ".join(groups))) == sorted(
        name for layer in layers for name in layer
    )
    assert len(groups) <= 8


def test_the_glossary_is_in_order() -> None:
    rows = re.findall(r"^\| (.+?) \|", (DOCS / "glossary.md").read_text(), flags=re.MULTILINE)
    terms = rows[2:]

    assert terms == sorted(set(terms), key=str.lower)


def test_documented_names_are_the_declared_ones() -> None:
    text = (DOCS / "methods.md").read_text()
    for group in ("models", "methods", "instruments"):
        for name in registry.names(group):
            assert f"| `{name}` |" in text


def test_the_table_of_targets_has_what_is_declared() -> None:
    text = (DOCS / "methods.md").read_text().partition("## Targets")[2]
    table = DOCS / "numbers" / "data" / "targets.csv"
    with table.open(encoding="utf-8", newline="") as file:
        rows = {row.pop("name"): row for row in csv.DictReader(file)}

    assert rows.keys() == list_targets().keys()
    assert [name for name in registry.names("targets") if f"`{name}`" not in text] == []
    for name, row in rows.items():
        target = registry.load("targets", name)
        assert row == {
            "memory_gib": f"{target.memory_bytes / 2**30:.1f}",
            "tb_per_s": f"{target.bandwidth_bytes_per_s / 1e12:g}",
            **{
                f"{dtype}_tflop_per_s": f"{flops_per_s / 1e12:g}"
                for dtype, flops_per_s in target.flops_per_s.items()
                if dtype != "float16"
            },
            "compute_capability": target.compute_capability,
        }


def test_code_in_the_guides_to_plugins_is_the_examples() -> None:
    guides = [DOCS / "how-to" / name for name in ("add-a-method.md", "profile-my-model.md")]
    text = "\n".join(guide.read_text() for guide in guides)
    blocks = re.findall(r"```(?:python|toml)\n(.*?)```", text, flags=re.DOTALL)
    files = [path.read_text() for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")]

    assert len(blocks) == 5
    assert [block for block in blocks if not any(block in file for file in files)] == []


def test_the_citation_names_the_license_of_the_package() -> None:
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())

    assert citation["license"] == package["license"]


FAULTS = (DOCS / "reliability.md").read_text().partition("## What is refused")[0]


def test_every_fault_has_a_test_that_exists_or_says_why_not() -> None:
    rows = [line for line in FAULTS.splitlines() if line.startswith("| ")]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row.rpartition(" | ")[2]) for row in rows]
    without = [row for row, tests in zip(rows, named, strict=True) if not tests]

    assert len(rows) > 35
    assert [
        row
        for row in without
        if not row.endswith(("| test |", "| --- |")) and "(not tested: " not in row
    ] == []
    assert [test for tests in named for test in tests if not is_a_test(*test)] == []


def is_a_test(file: str, name: str) -> bool:
    return (ROOT / file).is_file() and f"\ndef {name}(" in (ROOT / file).read_text()


@pytest.mark.parametrize(
    ("name", "least", "untested"),
    [
        ("misuse-of-clipping.csv", 51, {"(not tested: nothing is promised)"}),
        ("faults.csv", 32, set()),
    ],
)
def test_every_row_of_a_table_of_promises_has_a_test(name, least, untested) -> None:
    with (DOCS / "numbers" / "data" / name).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    named = [re.findall(r"(tests/[\w/]+\.py)::(\w+)", row["tests"]) for row in rows]
    without = [row["tests"] for row, tests in zip(rows, named, strict=True) if not tests]

    assert len(rows) >= least
    assert set(without) == untested
    assert [test for tests in named for test in tests if not is_a_test(*test)] == []
