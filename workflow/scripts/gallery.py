"""Write the gallery of the documentation: every figure, and what it is about.

The pictures are those in ``results/figures``, which ``make gallery`` draws of the thorough sweep.
A figure for which that sweep has no results keeps the picture that it had.
"""

import shutil
from pathlib import Path

from dpprof.experiments.config import registry
from dpprof.results.report.content import find_section
from dpprof.results.report.rendering.document import Drawing

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "images" / "gallery"

_BEGIN = """# Gallery

Which figures are there, and what do they answer? Each has the title of its section in the report.
A report has the figures that its sweep has results for. To draw one from the tables of a sweep:

```
dpprof figure --figure NAME --tables results/tables --output NAME.png
```

`make gallery` draws these pictures anew, of the [thorough sweep](../config/thorough.yaml), and
keeps the picture of a figure for which that sweep has no results.
"""


def write_page() -> str:
    """Return the page as Markdown."""
    return "\n".join([_BEGIN, *map(show, registry.names("figures"))])


def show(name: str) -> str:
    """Return the part of the page about a figure."""
    is_drawn = (PICTURES / f"{name}.png").is_file()
    picture = f"![{name}](images/gallery/{name}.png)\n\n" if is_drawn else ""
    return f"""## {name}

{find_section(name)}

{picture}{registry.caption("figures", name)}
"""


def main() -> None:
    """Run from the command line."""
    drawn = ROOT / "results" / "figures"
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in registry.names("figures"):
        said = (drawn / f"{name}.json").read_text(encoding="utf-8")
        if Drawing.model_validate_json(said).missing is None:
            shutil.copy(drawn / f"{name}.png", PICTURES)
    for picture in PICTURES.glob("*.png"):
        if picture.stem not in registry.names("figures"):
            picture.unlink()
    PAGE.write_text(write_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
