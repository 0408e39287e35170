"""``dpprof audit`` runs a user's own training, and ends with 1 where it says too little."""

import sys

import pytest
from scripts import call

TRAINING = """
import torch

def losses_of(model, x):
    return model(x).square().mean(1)

def leak(model, data, losses_of):
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.utils.data.default_collate(list(data[at] for at in range(len(data))))
    losses_of(model, *batch).mean().backward()
    sgd.step()
    return EPSILON

def audited():
    return torch.nn.Linear(3, 1), losses_of, [(torch.ones(3),)], leak
"""


@pytest.mark.parametrize(("epsilon", "status"), [(1.0, 1), (100.0, 0)])
def test_the_status_says_whether_the_bound_exceeds(epsilon, status, tmp_path, monkeypatch) -> None:
    name = f"training_of_{status}"
    code = TRAINING.replace("EPSILON", str(epsilon))
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.setattr(sys, "path", sys.path[:])
    done = call("audit", f"{name}:audited", "--delta=1e-5", "--canaries=200", cwd=tmp_path)

    assert done.returncode == status
    assert ("NOT AS PRIVATE AS ITS ACCOUNTANT SAYS" in done.stdout + done.stderr) == bool(status)
    assert "guesses on 200 canaries were right" in done.stdout + done.stderr


def test_bad_input_is_refused_with_a_sentence(tmp_path) -> None:
    done = call("audit", "tiny", "--delta=1e-5", cwd=tmp_path)
    assert done.returncode == 1
    assert "name a function, as package.module:name" in done.stderr
    done = call("audit", "nowhere:audited", "--delta=1e-5", cwd=tmp_path)
    assert "there is no such module, here or installed" in done.stderr
    done = call("audit", "nowhere:audited", "--delta=2", cwd=tmp_path)
    assert done.returncode == 2
    assert "'2' is not allowed; it must be above 0, below 1" in done.stderr
