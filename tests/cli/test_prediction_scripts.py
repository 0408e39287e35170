"""The command lines that ask about a device that need not be here."""

import json

import pytest
from factory import make_experiment, write_synthetic_verdict
from scripts import ROOT, run

from dpprof.planning.code_digest import verdict_digest

MODEL = "{vocab_size: 16, d_model: 8, layers: 1, heads: 2}"
TARGET = "{memory_bytes: 1MiB, flops_per_s: 1e12, bandwidth_bytes_per_s: 1e11}"
ASKED = ["--model", MODEL, "--seq-len", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ask for two methods once; what follows finds the answers there."""
    path = tmp_path_factory.mktemp("asked")
    methods = ["--methods", "standard", "opacus-hooks"]
    done = run("capacity", *ASKED, "--target", TARGET, *methods, "--json=c.json", cwd=path)
    assert done.returncode == 1, done.stderr  # libraries alone take more than 1 MiB
    options = [*ASKED, "--target", "l4", "--memory-limit-bytes", "60MiB", *methods]
    done = run("capacity", *options, "--json=capacity.json", cwd=path)
    assert done.returncode == 0, done.stderr
    done = run("advise", *options, "--json=advice.json", cwd=path)
    assert done.returncode == 0, done.stderr
    (path / "told").write_text(done.stdout)
    return path


def test_what_does_not_fit_says_how_much_it_needs(folder) -> None:
    for found in json.loads((folder / "c.json").read_text()):
        assert found["outcome"] == "oom"
        assert f"custom with {found['method']} needs" in found["message"]
        assert "and there are 1 MiB" in found["message"]


def test_capacity_is_told_to_programs_and_kept_as_results(folder) -> None:
    found = json.loads((folder / "capacity.json").read_text())

    assert [one["method"] for one in found] == ["standard", "opacus-hooks"]
    for one in found:
        told = one["capacity"]
        assert told["peak_bytes"] <= told["budget_bytes"] == 60 * 2**20
        assert told["safe_batch_size"] <= told["batch_size"] <= told["unfragmented_batch_size"]
    assert len(list((folder / "results" / "capacity").glob("*.r0.json"))) == 4


def test_advice_rests_on_the_same_results(folder) -> None:
    advice = json.loads((folder / "advice.json").read_text())
    capacity = {
        one["method"]: one["capacity"] for one in json.loads((folder / "capacity.json").read_text())
    }
    told = (folder / "told").read_text()

    assert [option["method"] for option in advice["options"]] == ["opacus-hooks", "standard"]
    assert [option["verdict"] for option in advice["options"]] == ["first", "baseline"]
    for option in advice["options"]:
        assert option["safe_batch_size"] == capacity[option["method"]]["safe_batch_size"]
    safe = capacity["opacus-hooks"]["safe_batch_size"]
    assert told.startswith(f"Use opacus-hooks with batches of {safe}: custom, 8 tokens")
    assert "opacus-hooks\N{DAGGER}  first" in told
    assert "\N{DAGGER} Not verified here to compute the right gradient" in told


def test_the_smallest_number_of_gpus_is_told(tmp_path) -> None:
    # Weights, gradients and AdamW's state take 97 MiB, and on each of four ranks 24 MiB.
    model = "{vocab_size: 16, d_model: 256, layers: 8, heads: 1}"
    fields = ["--model", model, "--seq-len", "2", "--target", "cpu"]
    options = ["--memory-limit-bytes", "60MiB", "--methods", "standard", "microbatch"]
    ranks = ["--world-sizes", "4", "1", "--json", "ranks.json"]
    done = run("capacity", *fields, *options, *ranks, cwd=tmp_path)
    found = json.loads((tmp_path / "ranks.json").read_text())

    assert [(one["method"], one["outcome"]) for one in found] == [
        *(("standard", "oom"), ("standard", "ok")),
        *(("microbatch", "oom"), ("microbatch", "unsupported")),
    ]
    ranks = {"kind": "fsdp", "world_size": 4, "reshard_after_forward": None}
    assert found[1]["parallel"] == ranks
    assert "smallest number of GPUs: standard 4\non none of 1, 4: microbatch" in done.stdout
    assert "standard, fsdp x4" in done.stdout


def test_world_sizes_are_said_once(tmp_path) -> None:
    ranks = ["--world-sizes", "2", "--parallel", "kind=ddp,world_size=4"]
    done = run("capacity", *ASKED, "--target", "l4", *ranks, cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr == (
        "error: --parallel: 'kind=ddp,world_size=4' is not allowed; --world-sizes says how many "
        "ranks; leave world_size out\n"
    )


def test_another_mechanism_is_marked_in_the_advice(folder) -> None:
    path = folder / "results" / "verify" / "built-in-opacus-hooks.json"
    digest = verdict_digest("built-in", "opacus-hooks")
    told = {"mechanism": "hooked clipping", "code_digest": digest}
    write_synthetic_verdict(folder, make_experiment(method="opacus-hooks"), **told)
    options = ["--target", "l4", "--memory-limit-bytes", "60MiB", "--methods", "opacus-hooks"]
    done = run("advise", *ASKED, *options, cwd=folder)
    path.unlink()

    assert "opacus-hooks\N{DOUBLE DAGGER}  first" in done.stdout
    assert "\N{DOUBLE DAGGER} Another mechanism than flat clipping; " in done.stdout


def test_a_method_that_failed_verification_is_not_advised(folder) -> None:
    path = folder / "results" / "verify" / "built-in-opacus-hooks.json"
    write_synthetic_verdict(
        folder,
        make_experiment(method="opacus-hooks"),
        False,
        reason="it differs",
        code_digest=verdict_digest("built-in", "opacus-hooks"),
    )
    options = ["--target", "l4", "--memory-limit-bytes", "60MiB", "--methods", "opacus-hooks"]
    done = run("advise", *ASKED, *options, cwd=folder)
    path.unlink()

    assert "No private method safely fits" not in done.stdout
    assert done.stdout.startswith("No private method can be advised: ")
    assert "opacus-hooks: its gradient is wrong: it differs" in done.stdout


BAD = {
    "unknown target": (
        ["--target", "h300"],
        "--target: 'h300' is not allowed; did you mean 'h200'",
    ),
    "no target": ([], "--target: missing; a target's name"),
    "half a target": (
        ["--target", "{memory_bytes: 1GiB}"],
        "--target: missing flops_per_s, bandwidth_bytes_per_s",
    ),
    "no memory": (
        ["--target", "h200", "--memory-limit-bytes", "0"],
        "--memory-limit-bytes: '0' is not allowed; it must be a number of bytes above 0",
    ),
    "unknown method": (
        ["--target", "h200", "--methods", "opacus-gost"],
        "--methods: 'opacus-gost' is not allowed; did you mean 'opacus-ghost'",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("script", ["capacity", "advise"])
def test_bad_input_is_one_sentence(script, case, tmp_path) -> None:
    options, sentence = BAD[case]
    done = run(script, *ASKED, *options, cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {sentence}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_a_target_is_only_for_predictions(tmp_path) -> None:
    options = [*ASKED, "--method=standard", "--batch-size=1", "--target=h200", "--output=x.json"]
    done = run("profile.py", *options, cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr == (
        "error: --target: 'h200' is not allowed; the instrument clean measures this machine and "
        "takes no target; instruments with a target: estimate, capacity\n"
    )


def test_another_packages_target_is_as_good_as_our_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "plugin"))
    options = [*ASKED, "--method=standard", "--batch-size=1", "--target=test-board"]
    done = run("profile.py", *options, "--instrument=estimate", "--output=x.json", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    compute = json.loads((tmp_path / "x.json").read_text())["compute"]
    assert compute["peak_source"] == "a board"
    assert compute["peak_flops_per_s"] == 1e9
