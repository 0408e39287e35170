"""What `make` asks the default sweep about."""

import pytest
from fresh_process import run_captured
from scripts import ROOT


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
    said = run_captured(["make", "--dry-run", "report", *options], ROOT).stdout

    assert all(one in said for one in asked), said


def test_a_config_beside_a_model_is_refused() -> None:
    refused = run_captured(
        ["make", "--dry-run", "report", "CONFIG=config/thorough.yaml", "MODEL=1b"], ROOT
    )

    assert refused.returncode != 0
    assert "give CONFIG, or them" in refused.stderr
