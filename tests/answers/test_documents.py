"""The page and the notebook on answers from Python run as they stand."""

import json
import re
import runpy
import sys

import pytest
from documents import find_code
from fresh_process import ROOT, run_fresh

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.predict.estimate import estimate

PAGE = "how-to/answers-from-python.md"
NOTEBOOK = ROOT / "examples" / "private_finetuning.ipynb"
SITE = runpy.run_path(str(ROOT / "docs" / "site_files.py"))


def test_the_function_of_the_page_builds_a_model_that_is_predicted() -> None:
    definition = find_code(PAGE, "def build").partition("asked =")[0]
    names: dict = {}
    exec(definition, names)  # noqa: S102 (the page's code)
    with registry.lent(names["build"]) as name:
        sizes = {"batch_size": 64, "seq_len": 1, "target": "l4", "device": "cuda"}
        found = estimate(Experiment(model=name, method="standard", **sizes), lambda _: None)

    assert found.model.parameters_total == 20 * 256 + 256 + 256 * 5 + 5


@pytest.mark.slow
def test_the_page_runs_as_it_stands(tmp_path) -> None:
    page = (ROOT / "docs" / PAGE).read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    said = run_fresh(f"import os; os.chdir({str(tmp_path)!r})\n{code}")

    assert "flash-bk, 4 x 64 tokens, bfloat16, adamw-fused, eager" in said
    assert "opacus-hooks needs" in said


@pytest.mark.slow
def test_the_notebook_runs_and_says_what_it_kept(tmp_path, monkeypatch, capsys) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run_notebook.py", str(NOTEBOOK)])
    runpy.run_path(str(ROOT / "examples" / "run_notebook.py"), run_name="__main__")
    said = capsys.readouterr().out

    kept = "".join(
        "".join(cell["outputs"][-1].get("text", "")) for cell in code_cells(notebook)[-2:]
    )
    assert "epsilon 7.99 at delta 0.0001" in kept
    assert kept.strip() in said.replace("\n\n", "\n")


def code_cells(notebook) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_page_of_the_notebook_has_its_code_and_what_it_showed() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    page = SITE["render_notebook"](NOTEBOOK)

    assert page.startswith("# From a GPU to an epsilon")
    for cell in code_cells(notebook):
        assert "```python\n" + "".join(cell["source"]) + "\n```" in page
    shown = [cell for cell in code_cells(notebook) if cell["outputs"]]
    assert shown == code_cells(notebook)  # run_notebook.py --keep keeps it
    assert "<p>Use flash-bk, 57 samples at once (bfloat16, adamw-fused, CUDA graph): " in page
    assert "epsilon 7.99 at delta 0.0001" in page
