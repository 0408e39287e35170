"""A config file that must not be loaded stops snakemake before it is."""

import pytest
from checkout import Checkout

pytestmark = pytest.mark.workflow

BAD = {
    "template": (
        b"__use_yte__: true\n__definitions__:\n  - open('pwned', 'w')\n",
        "error: my.yaml: the key __use_yte__ is not allowed, because Snakemake executes the Python",
    ),
    "twice": (
        b"sweeps:\n  one: {}\n  one: {}\n",
        "error: my.yaml: the key 'one' occurs twice in the mapping that begins in line 2",
    ),
    "binary": (b"sweeps: \xff\n", "error: my.yaml: is not UTF-8 text, see byte 9"),
    "deep": (b"a: " + b"[" * 100_000, "error: my.yaml: nests deeper than 50 levels"),
    "missing": (None, "error: [Errno 2] No such file or directory: 'my.yaml'"),
}


@pytest.mark.parametrize("content", BAD)
def test_a_bad_config_file_is_a_sentence_and_is_never_executed(
    checkout: Checkout, content: str
) -> None:
    written, sentence = BAD[content]
    if written is not None:
        (checkout.path / "my.yaml").write_bytes(written)
    said = checkout.snakemake("-n", "--configfile", "my.yaml", status=1)

    assert said.splitlines()[-1].startswith(sentence)
    assert "Traceback" not in said
    assert not (checkout.path / "pwned").exists()
    assert not (checkout.path / "results").exists()


def test_the_default_config_is_looked_at_without_the_profile_too(checkout: Checkout) -> None:
    (checkout.path / "config" / "config.yaml").write_bytes(BAD["template"][0])
    said = checkout.snakemake("-n", "-c1", "--workflow-profile", "none", status=1)

    assert "config/config.yaml: the key __use_yte__ is not allowed" in said
    assert not (checkout.path / "pwned").exists()
