"""The library by itself: a wheel of ``dpprof.private`` alone, and what its import loads."""

import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from fresh_process import run_fresh

ROOT = Path(__file__).resolve().parents[2]
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "dpprof-private"
version = "0.1.0"
[tool.setuptools.packages.find]
where = ["src"]
namespaces = true
"""
CLIPS = """
import sys
import torch
from dpprof.private import BookKeeping, NoisyOptimizer

model = torch.nn.Linear(3, 1, bias=False)
clipping = BookKeeping(model, max_grad_norm=0.5)
optimizer = NoisyOptimizer(
    torch.optim.SGD(model.parameters(), lr=1.0), clipping, noise_multiplier=0.0,
    expected_batch_size=2,
)
before = model.weight.detach().clone()
clipping.backward(model(torch.ones(2, 3)).squeeze(1))
optimizer.step()
# Each gradient is (1, 1, 1), of norm 3^0.5, clipped to 0.5; the step is their mean.
assert torch.allclose(before - model.weight, torch.full((1, 3), 0.5 / 3**0.5)), model.weight
loaded = {name for name in sys.modules if name.startswith("dpprof.")}
assert {name.split(".")[1] for name in loaded} == {"private"}, loaded
assert not {"pydantic", "opacus", "pandas", "yaml"} & set(sys.modules)
print("clipped")
"""


def test_a_wheel_of_the_library_alone_clips_a_model(tmp_path) -> None:
    library = tmp_path / "src" / "dpprof" / "private"
    kept = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "dpprof" / "private", library, ignore=kept)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = tmp_path / "alone"
    install = ["install", "--no-deps", "--no-build-isolation", "--target", str(alone), "."]
    subprocess.run([*pip, *install], cwd=tmp_path, check=True)

    # Without the site module nothing but these folders is found: no editable dpprof.
    found = subprocess.run(
        [sys.executable, "-S", "-c", CLIPS],
        env={"PYTHONPATH": f"{alone}:{sysconfig.get_path('purelib')}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert found.stdout == "clipped\n", found.stderr


def test_its_import_loads_nothing_else_of_the_package() -> None:
    said = run_fresh(
        "import json, sys\n"
        "from dpprof.private import BookKeeping, PrivateTrainer, check, make_private\n"
        "print(json.dumps([name for name in sys.modules if name.startswith('dpprof.')]))"
    )

    assert {name.split(".")[1] for name in json.loads(said)} == {"private"}
