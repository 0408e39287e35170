"""A bad config stops snakemake with a sentence before anything is executed or run."""

import sys

import pytest
import yaml
from checkout import ROOT, Checkout

TEMPLATE = "__use_yte__: true\n__definitions__:\n  - open('pwned', 'w')\n"
REFUSED = "the key __use_yte__ is not allowed, because Snakemake executes the Python"
REAL = {
    "the default without the profile": (
        ("-n", "-c1", "--workflow-profile", "none"),
        "config/config.yaml: " + REFUSED,
    ),
    "names that a shell would execute": (
        ("--configfile", "shell.yaml"),
        "sweeps.$(touch pwned): ",
    ),
}


@pytest.mark.workflow
def test_a_bad_config_is_a_sentence_and_is_never_executed(checkout: Checkout) -> None:
    text = (checkout.path / "config" / "config.yaml").read_text()
    (checkout.path / "shell.yaml").write_text(text.replace("  one:", "  $(touch pwned):"))
    (checkout.path / "config" / "config.yaml").write_text(TEMPLATE)
    for options, sentence in REAL.values():
        said = checkout.snakemake(*options, status=1)

        assert sentence in said
        assert "Traceback" not in said
        assert not (checkout.path / "pwned").exists()
        assert not (checkout.path / "results").exists()


@pytest.mark.parametrize("name", ["default", "slurm", "kubernetes"])
def test_every_profile_refuses_a_bad_config_before_snakemake_loads_it(
    name, tmp_path, monkeypatch
) -> None:
    """Snakemake executes a profile's definitions first; here nothing else does."""
    (tmp_path / "my.yaml").write_text(TEMPLATE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["snakemake", "-n", "--configfile", "my.yaml"])
    profile = yaml.safe_load((ROOT / "profiles" / name / "profile.yaml").read_text())

    assert profile["__use_yte__"] is True
    with pytest.raises(SystemExit, match=f"^error: my.yaml: {REFUSED}"):
        exec(profile["__definitions__"][0], {})  # noqa: S102 (what Snakemake does)
