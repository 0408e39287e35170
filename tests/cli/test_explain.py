"""``dpprof explain``: what it prints and draws, and what it refuses in one sentence."""

import json
import re
import sys

import pytest
from factory import make_experiment, make_held, write_synthetic
from snapshots import assert_reviewed

from dpprof.ask.estimate import estimate
from dpprof.ask.explain import main
from dpprof.experiments.records.result import result_path

SIZES = {"standard": {"parameters": 800}, "flash": {"parameters": 800, "noise": 300}}


def write(root, method, *, layer="head", **fields):
    """Write a synthetic result, and return its path."""
    experiment = make_experiment(method=method)
    usual = {"instrument": "memory", "recorded": make_held(SIZES[method], layer)}
    write_synthetic(root, experiment, **(usual | fields))
    return result_path(root, (usual | fields)["instrument"], experiment.id, 0)


@pytest.fixture
def a(tmp_path):
    return write(tmp_path, "flash")


@pytest.fixture
def b(tmp_path):
    return write(tmp_path, "standard")


def told(capsys, *arguments) -> str:
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def refused(capsys, *arguments) -> str:
    """Return the sentence of an error."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    out, error = capsys.readouterr()
    assert out == ""
    assert ended.value.code in (1, 2)
    *_, sentence = error.strip().splitlines()
    return sentence


@pytest.mark.parametrize("depth", ["component", "layer", "operator"])
def test_the_sentence_comes_first_and_bars_to_the_innermost_level_follow(
    depth, a, b, capsys
) -> None:
    said = told(capsys, a, b, "--depth", depth)

    assert said == told(capsys, a, b) or depth != "layer"  # as it is by default
    assert_reviewed(f"cli/explained by {depth}", said.replace(f"{a.parent}/", ""))


def test_a_run_that_keeps_its_logits_says_so_and_what_to_write(b, tmp_path, capsys) -> None:
    kept = make_experiment(method="flash", keep_logits=True)
    recorded = make_held(SIZES["flash"], "head")
    write_synthetic(tmp_path, kept, instrument="memory", recorded=recorded)
    last = told(capsys, result_path(tmp_path, "memory", kept.id, 0), b).splitlines()[-1]

    assert last.startswith("flash")
    assert last.endswith("loss = model(...).loss frees them.")


def test_json_is_exact_and_has_every_level_and_both_timelines(a, b, capsys) -> None:
    found = json.loads(told(capsys, b, a, "--format", "json", "--depth", "component"))
    by_name = {bar["name"]: bar for bar in found["bars"]}

    assert (found["a"]["name"], found["b"]["name"]) == ("standard", "flash")
    assert found["difference_bytes"] == -300
    assert by_name["noise"]["bars"][0]["bars"][0] == {
        "name": "mm (forward)",
        "a_bytes": 0,
        "b_bytes": 300,
        "difference_bytes": -300,
        "bars": [],
    }
    assert found["timelines"]["a"]["total_bytes"] == [400, 800, 400]
    assert found["timelines"]["b"]["total_bytes"] == [550, 1100, 550]


def test_a_drawing_is_written_beside_the_text(a, b, tmp_path, capsys) -> None:
    for ending, begins in {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}.items():
        output = tmp_path / "new" / f"x.{ending}"
        assert "flash needs" in told(capsys, a, b, "--output", output)
        assert output.read_bytes().startswith(begins)


def test_a_layer_with_a_hostile_name_disturbs_no_terminal(b, tmp_path, capsys) -> None:
    a = write(tmp_path, "flash", layer="\x1b[2J\u202e</script>\n|")
    for form in ("text", "json"):
        said = told(capsys, a, b, "--format", form, "--output", tmp_path / "x.png")
        assert all(line.isprintable() for line in said.splitlines())


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("{", "is not complete JSON: it was cut or damaged"), ("[]", "is not a result file")],
)
def test_a_file_that_is_no_good_result_is_named_and_may_stay(
    content, sentence, a, b, capsys
) -> None:
    b.write_text(content)
    said = refused(capsys, a, b)

    assert said.startswith(f"error: {b}: {sentence}")
    assert "delete" not in said


def test_one_file_twice_is_refused_however_it_is_named(a, tmp_path, capsys) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(a)

    for other in (a, link):
        assert refused(capsys, a, other) == (
            f"error: {other}: A and B are the same file; name two results"
        )


def test_another_loop_is_predicted_beside_a_run(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"method": "standard", "batch_size": 3, "seq_len": 24, "device": "cpu"}
    asked |= {"model": {"vocab_size": 2000, "d_model": 16, "layers": 2, "heads": 2}}
    a = tmp_path / "a.json"
    estimate(output=a, loop="timm", dtype="bfloat16", optimizer="sgd", **asked)
    first, *_, of_a, of_b = told(capsys, a, "--loop", "opacus-tutorial").splitlines()
    found = json.loads(told(capsys, a, "--loop", "opacus-tutorial", "--format", "json"))

    # Both keep logits of 16 bits; the loss holds three times as many in 32 or in 16.
    assert found["difference_bytes"] == pytest.approx(3 * 2 * 3 * 24 * 2000, rel=0.001)
    assert re.match(
        r"standard \(loop timm\) needs .* more than standard \(loop opacus-tutorial\)", first
    )
    assert "benchmark.py" in of_a
    assert of_b.startswith("standard (loop opacus-tutorial): Opacus, tutorials/")
    assert refused(capsys, a) == "error: B: give another result, or --loop, and not both"
    assert "--loop: 'x' is not allowed; it must be" in refused(capsys, a, "--loop", "x")


WRONG = {
    "no such file": (["nowhere.json"], r"error: nowhere\.json: there is no such file; .*"),
    "a folder": (["."], r"error: \.: .*\(it is not a file\)"),
    "an empty path": ([""], r".*'' is not allowed; it must be a path"),
    "no lines": (["{b}", "--top", "0"], r".*'0' is not allowed; it must be 1, 2, 3 \.\.\."),
    "half a line": (["{b}", "--top", "1.5"], r".*'1.5' is not allowed; it must be 0, 1, 2 .*"),
    "very many": (["{b}", "--top", "9" * 5000], r".*is not allowed; it must be 0, 1, 2 .*"),
    "a depth": (["{b}", "--depth", "block"], r".*invalid choice: 'block'.*"),
    "a format": (["{b}", "--format", "markdown"], r".*invalid choice: 'markdown'.*"),
    "a drawing": (["{b}", "--output", "x.gif"], r".*'x.gif' is not allowed; its ending must.*"),
    "nowhere to write": (["{b}", "--output", "{b}/x.png"], r"error: .*"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input_is_one_sentence(case, a, b, capsys) -> None:
    arguments, sentence = WRONG[case]
    said = refused(capsys, a, *(argument.format(b=b) for argument in arguments))

    assert re.search(rf"{sentence}$", said)


def test_text_needs_no_plotting_library(a, b, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "dpprof.results.figures.waterfall", None)

    assert "flash needs" in told(capsys, a, b)
    assert "is not installed; pip install 'dpprof[report]'" in refused(
        capsys, a, b, "--output", "x.png"
    )
