"""A bad config stops snakemake with a sentence before anything is executed or run."""

import pytest
from checkout import Checkout

pytestmark = pytest.mark.workflow

TEMPLATE = "__use_yte__: true\n__definitions__:\n  - open('pwned', 'w')\n"
REFUSED = "the key __use_yte__ is not allowed, because Snakemake executes the Python"
ALL = {
    "a template": (("-n", "--configfile", "my.yaml"), "error: my.yaml: " + REFUSED),
    "a template, for Slurm": (
        ("-n", "--workflow-profile", "profiles/slurm", "--configfile", "my.yaml"),
        "error: my.yaml: " + REFUSED,
    ),
    "a template, for Kubernetes": (
        ("-n", "--workflow-profile", "profiles/kubernetes", "--configfile", "my.yaml"),
        "error: my.yaml: " + REFUSED,
    ),
    "a missing file": (
        ("-n", "--configfile", "no.yaml"),
        "error: [Errno 2] No such file or directory: 'no.yaml'",
    ),
    "the default without the profile": (
        ("-n", "-c1", "--workflow-profile", "none"),
        "config/config.yaml: " + REFUSED,
    ),
    "names that a shell would execute": (
        ("--configfile", "shell.yaml"),
        "sweeps.$(touch pwned): ",
    ),
}


def test_a_bad_config_is_a_sentence_and_is_never_executed(checkout: Checkout) -> None:
    text = (checkout.path / "config" / "config.yaml").read_text()
    (checkout.path / "shell.yaml").write_text(text.replace("  one:", "  $(touch pwned):"))
    for path in ("my.yaml", "config/config.yaml"):
        (checkout.path / path).write_text(TEMPLATE)
    for options, sentence in ALL.values():
        said = checkout.snakemake(*options, status=1)

        assert sentence in said
        assert "Traceback" not in said
        assert not (checkout.path / "pwned").exists()
        assert not (checkout.path / "results").exists()
