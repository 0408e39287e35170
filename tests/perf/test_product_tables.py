"""A table that ships is what its source gives, where the source is installed."""

from importlib.metadata import version

import pytest

from dpprof.predict.step_time.product_table import read_document


@pytest.mark.slow
def test_a_table_is_derived_again_from_its_source() -> None:
    pytest.importorskip("aiconfigurator_core", reason="aiconfigurator-core is not installed")
    pytest.importorskip("pyarrow", reason="aiconfigurator-core's tables need pyarrow")
    import product_tables  # noqa: PLC0415 (its source is no dependency)

    shipped = read_document("h100")
    if product_tables.SOURCE + " " + version(product_tables.SOURCE) not in shipped["source"]:
        pytest.skip("another version of aiconfigurator-core is installed")
    assert product_tables.derive("h100")[0] == shipped
