"""``dpprof compare`` as a gate: its exit status, what it prints, and what it refuses."""

import functools
import json
import re

import pytest
import yaml
from documents import validate
from factory import make_capacity, make_experiment, make_held, make_memory, write_synthetic
from scripts import ROOT
from snapshots import assert_reviewed, assert_sentences

from dpprof.ask.compare import main
from dpprof.ask.explain import main as explain
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.comparison import FolderComparison, Thresholds
from dpprof.predict.estimate import estimate

SIZES = {"parameters": 800, "noise": 100}
FLASH = make_experiment(method="flash")


def write_estimate(root, sizes=SIZES, experiment: Experiment = FLASH, **fields) -> None:
    compute = fields.pop("compute", {})
    write_synthetic(
        root,
        experiment,
        **{"instrument": "estimate", "recorded": make_memory(sizes, **compute)} | fields,
    )


@pytest.fixture
def folders(tmp_path):
    """Two folders; the baseline holds one estimate."""
    write_estimate(tmp_path / "a")
    return tmp_path / "a", tmp_path / "b"


def end(capsys, *arguments) -> tuple[int, str, str]:
    """Return the exit status, and what was printed for whom."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code, *capsys.readouterr()


def gate(capsys, *arguments) -> tuple[int, str]:
    """Return the exit status and what was printed."""
    code, out, error = end(capsys, *arguments)
    assert error == ""
    return code, out


def gate_json(capsys, *arguments) -> FolderComparison:
    code, out = gate(capsys, *arguments, "--format", "json")
    document = json.loads(out)
    validate(document, "comparison")
    assert document["exit_status"] == code
    return document


def names(found, judgement="worse") -> list[tuple[str, str | None]]:
    return [(f["figure"], f["part"]) for f in found["figures"] if f["judgement"] == judgement]


def refused(capsys, *arguments) -> str:
    code, out, error = end(capsys, *arguments)
    assert (code, out) == (2, "")
    return error.strip().splitlines()[-1]


def test_two_real_estimates_of_the_same_code_exit_with_0_and_all_is_the_same(
    tmp_path, capsys
) -> None:
    experiment = make_experiment(method="flash-bk", target="h100", device="cuda")
    for side in ("a", "b"):
        recorded = estimate(experiment, lambda _: None).model_dump(exclude={"model", "samplers"})
        write_estimate(tmp_path / side, experiment=experiment, recorded=recorded)
    found = gate_json(capsys, tmp_path / "a", tmp_path / "b")

    assert (found["verdict"], found["figures"]) == ("nothing worse", [])
    assert found["counts"]["same"] == sum(found["counts"].values()) > 50
    # Two peaks, reserved twice, whether it fits, 20 components; a predicted time.
    assert (found["judged"]["memory"], found["judged"]["time"]) == (25, 1)


OTHER = make_experiment(method="flash", timed_steps=20)
ONE_FLOP_MORE = make_memory(SIZES)
ONE_FLOP_MORE["io"]["by_phase_and_op_kind"][0]["flops"] += 1
A_NEW_KIND = make_memory(SIZES)
A_NEW_KIND["io"]["by_phase_and_op_kind"].append(
    A_NEW_KIND["io"]["by_phase_and_op_kind"][0]
    | {"op_kind": "einsum", "flops": 1, "read": 0, "written": 0}
)
DIFFERENCES = {
    "compare - a new op kind": ({"recorded": A_NEW_KIND}, [], 1),
    "compare - more of one component": ({"sizes": SIZES | {"noise": 102}}, [], 1),
    "compare - more FLOPs of one kind": ({"recorded": ONE_FLOP_MORE}, ["--metrics", "flops"], 1),
    "compare - less memory": ({"sizes": SIZES | {"noise": 50}}, [], 0),
    "compare - disjoint folders": ({"experiment": OTHER}, [], 2),
}
"""What the candidate has, options, and the exit status."""


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_is_named(folders, tmp_path, capsys, name) -> None:
    fields, options, status = DIFFERENCES[name]
    write_estimate(folders[1], **fields)
    code, said = gate(capsys, *folders, *options)

    assert code == status
    assert_reviewed(f"cli/{name}", said.replace(f"{tmp_path}/", ""))


def test_what_is_on_one_side_alone_is_listed_and_fails_nothing(folders, capsys) -> None:
    write_estimate(folders[0], experiment=make_experiment(method="microbatch"))
    write_estimate(folders[1])
    code, said = gate(capsys, *folders)

    assert code == 0
    assert "Only in the baseline: custom-microbatch-" in said
    assert "Only in the candidate" not in said


def test_a_threshold_of_a_component_is_its_own(folders, tmp_path, capsys) -> None:
    write_estimate(folders[1], SIZES | {"noise": 102})
    file = tmp_path / "thresholds.yaml"
    file.write_text("{memory: 1%, components: {noise: 2%}}")
    found = gate_json(capsys, *folders, "--thresholds", file)

    assert found["verdict"] == "nothing worse"
    assert set(names(found, "within threshold")) == {
        *(("peak", None), ("peak of the first step", None), ("component", "noise"))
    }
    assert found["thresholds"]["components"] == {"noise": 0.02}

    file.write_text("{memory: 1%, components: {noise: 1.99%}}")
    assert names(gate_json(capsys, *folders, "--thresholds", file)) == [("component", "noise")]


def test_thresholds_that_decimals_cannot_spell_exactly_are_exact(folders, tmp_path, capsys) -> None:
    write_estimate(folders[1], SIZES | {"noise": 129})
    file = tmp_path / "thresholds.yaml"
    file.write_text("{memory: 100%, components: {noise: 29%}}")  # 0.29 * 100 < 29 in binary

    assert gate(capsys, *folders, "--thresholds", file)[0] == 0


def test_bad_thresholds_are_one_sentence(folders, tmp_path, capsys) -> None:
    file = tmp_path / "thresholds.yaml"

    def refusal_of(text: str) -> str:
        file.write_text(text)
        return refused(capsys, *folders, "--thresholds", file).replace(f"{tmp_path}/", "")

    assert_sentences("cli/thresholds", refusal_of)


def test_an_empty_file_of_thresholds_has_the_defaults(folders, tmp_path, capsys) -> None:
    write_estimate(folders[1])
    (tmp_path / "thresholds.yaml").write_text("# none\n")
    found = gate_json(capsys, *folders, "--thresholds", tmp_path / "thresholds.yaml")

    assert found["thresholds"] == Thresholds().model_dump()


def test_bad_folders_are_one_sentence_and_exit_with_2(folders, tmp_path, capsys) -> None:
    a, b = folders
    write_estimate(b)
    (file,) = b.glob("results/estimate/*.json")
    (tmp_path / "empty").mkdir()
    whole = file.read_text()

    wrong = {
        tmp_path / "none": "none: is not a folder; name one that holds results",
        tmp_path / "empty": "empty: holds no results, which are INSTRUMENT/ID.rN.json",
        a: "baseline and candidate are the same folder",
    }
    for folder, sentence in wrong.items():
        assert sentence in refused(capsys, a, folder)
    damage = {
        whole[:100]: f"error: {file}: is not complete JSON: it was cut or damaged",
        whole.replace('"schema_version": 2', '"schema_version": 1'): (
            f"{file}: has schema version 1, and this dpprof reads 2"
        ),
    }
    for text, sentence in damage.items():
        file.write_text(text)
        assert sentence in refused(capsys, a, b)
    file.write_text(whole)
    file.rename(file.with_name("other.r0.json"))
    assert f"other.r0.json: holds another run, {FLASH.id}.r0 of estimate" in refused(capsys, a, b)


def test_bad_options_are_one_sentence(folders, capsys) -> None:
    write_estimate(folders[1])
    refusal_of = functools.partial(refused, capsys, *folders)

    assert_sentences("cli/options of compare", refusal_of)
    assert "invalid choice: 'html'" in refusal_of("--format=html")  # in the words of Python


def test_the_command_that_it_names_explains_the_memory(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for side, noise in (("a b", 100), ("c", 130)):
        told = make_held(SIZES | {"noise": noise}, None)
        write_estimate(tmp_path / side, recorded=told)
    found = gate_json(capsys, "a b", "c")

    (told,) = found["explanations"]
    name = f"results/estimate/{FLASH.id}.r0.json"
    assert told["command"] == f"dpprof explain c/{name} 'a b/{name}'"
    explain([f"c/{name}", f"a b/{name}"])
    assert "30 bytes more" in capsys.readouterr().out
    assert told["command"] in gate(capsys, "a b", "c")[1]


def test_markdown_goes_to_the_file_and_the_text_to_the_terminal(folders, tmp_path, capsys) -> None:
    write_estimate(folders[1], SIZES | {"noise": 102})
    output = tmp_path / "new" / "comment.md"
    code, said = gate(capsys, *folders, "--format", "markdown", "--output", output)

    assert code == 1
    assert said.splitlines()[2] == "Worse"
    lines = output.read_text().splitlines()
    assert lines[0] == "**dpprof compare: regression**"
    row = f"| noise at the peak | {FLASH.id} | estimate | 100 bytes | 102 bytes | "
    assert f"{row}+2 bytes (+2.00 %) |" in lines


def test_folders_may_have_names_without_encoding(tmp_path, capsys) -> None:
    sides = [tmp_path / "a\udcff\n| b", tmp_path / "b"]
    for side, noise in zip(sides, (100, 101), strict=True):
        write_estimate(side, SIZES | {"noise": noise})

    assert gate_json(capsys, *sides)["baseline"].endswith("a\\udcff\n| b/results")
    for form in ("text", "markdown"):
        code, said = gate(capsys, *sides, "--format", form)
        assert code == 1
        assert "udcff" in said
    assert "c\\udcff: is not a folder" in refused(capsys, tmp_path / "c\udcff", sides[1])


def test_other_files_are_left_alone_in_the_folder_of_instruments_too(folders, capsys) -> None:
    write_estimate(folders[1])
    for name in ("figures/x.json", "verify/hf-x.r1-flash.json", "plan/manifest-x.json"):
        file = folders[1] / "results" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("{")

    for baseline in (folders[0], folders[0] / "results"):
        assert gate(capsys, baseline, folders[1])[0] == 0


def test_a_smaller_largest_batch_is_a_regression_and_other_batches_are_not_compared(
    tmp_path, capsys
) -> None:
    for side, batch_size in (("a", 8), ("b", 7)):
        told = make_capacity(safe_batch_size=batch_size, stated_batch_size=batch_size)
        told["compute"] |= {"executed_flops": 200 + 10 * (8 - batch_size)}
        write_estimate(tmp_path / side, instrument="capacity", recorded=told)
    found = gate_json(capsys, tmp_path / "a", tmp_path / "b")

    assert names(found) == [("largest safe batch", None)]
    assert found["counts"]["undecided"] == 0


def test_documented_thresholds_and_json_are_the_ones_that_exist(tmp_path) -> None:
    page = (ROOT / "docs" / "how-to" / "gate-regressions.md").read_text()
    (example,) = re.findall(r"```yaml\n(memory:.*?)```", page, flags=re.DOTALL)
    thresholds = Thresholds.model_validate(yaml.safe_load(example))

    assert set(thresholds.model_fields_set) == set(Thresholds.model_fields)
    for key in FolderComparison.model_fields:
        assert f"`{key}`" in page
