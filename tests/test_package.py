"""The wheel without the checkout: its command, the README's loop, and its types."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from documents import find_code

ROOT = Path(__file__).parents[1]
PACKAGED = ("src", "pyproject.toml", "README.md", "LICENSE")

USER = """
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(40, 3))
data_loader: DataLoader[tuple[Tensor, ...]] = DataLoader(data, batch_size=10, shuffle=True)


def sample_losses(x: Tensor) -> Tensor:
    losses: Tensor = model(x).square().mean(1)
    return losses


"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", name="run")
def installed(tmp_path_factory) -> Callable[..., str]:
    """Install the wheel beside this environment's torch; return what runs Python there."""
    folder = tmp_path_factory.mktemp("package")
    for name in PACKAGED:
        source, target = ROOT / name, folder / "source" / name
        target.parent.mkdir(exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    alone = ["--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "source"]
    subprocess.run([*pip, "wheel", *alone], check=True)
    venv.create(folder / "venv", symlinks=True)
    own = folder / "venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    # Not dpprof: what a .pth file names has its own .pth files ignored, as that of an editable one.
    (own / "site-packages" / "others.pth").write_text(sysconfig.get_path("purelib"))
    (wheel,) = folder.glob("dpprof-*.whl")
    python = folder / "venv" / "bin" / "python"
    subprocess.run(
        [*pip, "--python", python, "install", "--no-deps", "--force-reinstall", wheel], check=True
    )
    work = folder / "work"
    work.mkdir()
    cleared = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [python, *arguments], cwd=work, env=cleared, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(own) in run("-c", "import dpprof; print(dpprof.__file__)")
    return run


def test_the_command_answers_what_the_readme_asks(run) -> None:
    asked = ("advise", "--model", "1b", "--target", "h200", "--seq-len", "1024")
    assert run("-m", "dpprof", *asked).startswith("Use flash-bk, 57 samples at once ")


def test_the_loop_of_the_readme_trains(run, tmp_path) -> None:
    file = tmp_path / "user.py"
    loop = find_code("../README.md", "make_private")
    file.write_text(f"{USER}{loop}\nprint(private.epsilon_spent())\n")
    assert 0 < float(run(str(file))) <= 3.0


def test_a_users_loop_is_checked_by_the_types_of_the_package(run, tmp_path) -> None:
    """``mypy --strict`` passes README's loop, and finds a wrong argument in it."""
    pytest.importorskip("mypy")
    file, loop = tmp_path / "user.py", find_code("../README.md", "make_private")
    file.write_text(USER + loop)
    assert "no issues found" in run("-m", "mypy", "--strict", str(file))
    file.write_text(USER + loop.replace("epochs=3", "epochs='three'"))
    with pytest.raises(
        AssertionError, match='Argument "epochs" to "make_private" has incompatible'
    ):
        run("-m", "mypy", "--strict", str(file))


def test_the_version_is_that_of_the_last_tag_and_the_commits_since(tmp_path) -> None:
    pytest.importorskip("setuptools_scm")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def describe(*actions: str) -> str:
        for action in actions:
            git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *action.split()]
            subprocess.run(git, cwd=tmp_path, check=True, capture_output=True)
        scm = [sys.executable, "-m", "setuptools_scm"]
        return subprocess.check_output(scm, cwd=tmp_path, text=True).strip()

    commit = "commit --allow-empty --message b"
    assert describe() == "0.1.0.dev0"  # without git, as in an image
    assert describe("init", "add .", commit).startswith(
        "0.1.0.dev1+g"
    )  # as in a clone without tags
    assert describe("tag v0.1.0") == "0.1.0"
    assert describe(commit, commit).startswith("0.1.1.dev2+g")
