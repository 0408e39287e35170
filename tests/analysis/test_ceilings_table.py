"""Ceilings of the devices of a config, beside what their data sheets say."""

import pytest
from factory import CPU, make_experiment, make_manifest, write_synthetic, write_synthetic_ceilings

from dpprof.experiments.config.validation import InputError
from dpprof.experiments.records.ceilings import ceilings_path, device_name
from dpprof.experiments.records.record import ResultError
from dpprof.results.analysis.collection import collect
from dpprof.results.analysis.tables.build import build_tables

STANDARD = make_experiment()
L4 = {"type": "cuda", "name": "NVIDIA L4", "uuid": "GPU-1"}
PATHS = [device_name(device) for device in (CPU, L4)]


@pytest.fixture
def root(tmp_path):
    write_synthetic(tmp_path, STANDARD)
    for device in (CPU, L4):
        write_synthetic_ceilings(tmp_path, device)
    return tmp_path


def collected(root, *, partial=False):
    paths = [ceilings_path(root, name) for name in PATHS]
    return collect(make_manifest((STANDARD, 0)), root, partial=partial, ceilings=paths)


def test_measured_figures_stand_beside_the_data_sheets(root) -> None:
    table = build_tables(collected(root))["ceilings"]
    rows = {
        (row["device"], row["dtype"], row["figure"]): row
        for row in table.astype(object).where(table.notna(), None).to_dict("records")
    }

    assert len(rows) == len(table) == 2 * 6
    product = rows["cuda-nvidia-l4", "bfloat16", "flops_per_s"]
    assert (product["measured"], product["size"], product["datasheet"]) == (1000.0, 10, 121e12)
    assert product["source"].startswith("NVIDIA L4 Tensor Core GPU data sheet")
    copies = rows["cuda-nvidia-l4", None, "bytes_per_s"]
    assert (copies["measured"], copies["size"], copies["datasheet"]) == (40.0, 40, 300e9)
    launch = rows["cuda-nvidia-l4", None, "launch_s"]
    assert (launch["measured"], launch["datasheet"], launch["source"]) == (0.001, None, None)
    unknown = rows["cpu-synthetic-cpu-2-cores", "tf32", "flops_per_s"]
    assert (unknown["measured"], unknown["reason"]) == (None, "synthetic")
    assert unknown["datasheet"] is None
    assert set(table["others_busy_cores"]) == {0.0}


def test_missing_ceilings_are_named_and_left_out_of_a_partial_report(root) -> None:
    ceilings_path(root, PATHS[0]).unlink()

    with pytest.raises(InputError, match=f"{PATHS[0]}.json: is missing; run snakemake"):
        collected(root)
    assert [one.device for one in collected(root, partial=True).ceilings] == [L4]


def test_damaged_ceilings_are_left_out_of_a_partial_report_alone(root) -> None:
    path = ceilings_path(root, PATHS[0])
    path.write_text(path.read_text()[:-9])

    with pytest.raises(ResultError, match="is not complete JSON"):
        collected(root)
    found = collected(root, partial=True)
    assert [one.device for one in found.ceilings] == [L4]
    assert [str(error).partition(": ")[0] for error in found.damaged] == [str(path)]
