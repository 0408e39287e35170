"""What `make` asks the default sweep about."""

import subprocess

import pytest
from scripts import ROOT


def ask(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--dry-run", "report", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (["EPSILON=8,4"], ["'privacy={epsilon: [8,4]}'"]),
        (["TARGET=l40s"], ['defaults={ target: "l40s"}']),
        (["MODEL=hf:gpt2"], ["'sweeps={from-scratch: none}'", 'model: "hf:gpt2"']),
        (["MODEL=1b"], ['sweeps={from-scratch: {model: "1b"}, adapters: none}', 'model: "1b"']),
    ],
)
def test_a_variable_asks_about_something_else(options, asked) -> None:
    said = ask(*options).stdout

    assert all(one in said for one in asked), said


def test_a_config_beside_a_model_is_refused() -> None:
    refused = ask("CONFIG=config/thorough.yaml", "MODEL=1b")

    assert refused.returncode != 0
    assert "give CONFIG, or them" in refused.stderr
