"""A sweep over what another package provides."""

import pytest
from checkout import TABLES, Checkout
from example_package import install_example

pytestmark = pytest.mark.workflow


def test_a_config_may_name_an_installed_packages_method_and_model(
    checkout: Checkout, tmp_path
) -> None:
    checkout.environment = {"PYTHONPATH": str(install_example(tmp_path))}
    (checkout.path / "config" / "config.yaml").write_text("""
sweeps:
  one:
    {model: example-mixer, method: example-vmap, batch_size: 2, seq_len: 4, device: cpu,
     warmup_steps: 1, timed_steps: 1}
""")
    checkout.snakemake(TABLES)
    (run,) = checkout.table("runs").to_dict("records")

    assert (run["method"], run["model"], run["outcome"]) == ("example-vmap", "example-mixer", "ok")
