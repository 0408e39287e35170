"""Lays the site out like the repository, so that links work in both; a hook of mkdocs.yml."""

import json
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/**/*.md", "config/*.md", "perf/*.md")
NOTEBOOK = ROOT / "examples" / "private_finetuning.ipynb"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the pages of docs/ by all pages of the repository and the files that they link."""
    pages = [page for pattern in PAGES for page in ROOT.glob(pattern)]
    paths = {*pages, *(file for page in pages for file in linked_files(page))}
    theme = [file for file in files if file.src_dir != config.docs_dir]
    ours = [
        File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, config.use_directory_urls)
        for path in sorted(paths)
    ]
    page = str(NOTEBOOK.relative_to(ROOT).with_suffix(".md"))
    ours.append(File.generated(config, page, content=render_notebook(NOTEBOOK)))
    return Files([*theme, *ours])


def render_notebook(notebook: Path) -> str:
    """Return a notebook as Markdown: its texts, its code, and what each cell showed."""
    parts = []
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("data", {})
            text = "".join(output.get("text") or shown["text/plain"])
            html = "".join(shown.get("text/html", f"```text\n{text}\n```"))
            parts.append(html.replace('<table class="dataframe">', "<table>"))  # the site's style
    return "\n\n".join(parts) + "\n"


def linked_files(page: Path) -> list[Path]:
    """Find the files of the repository that a page links."""
    links = re.findall(r"\]\(([^)\s#]+)", page.read_text(encoding="utf-8"))
    files = [(page.parent / link).resolve() for link in links if "://" not in link]
    return [file for file in files if file.is_file()]
