"""What each command refuses, in one sentence and before anything runs."""

import os
import shlex
from pathlib import Path

import pytest
from scripts import ASKED, HERE, call
from snapshots import assert_sentences

RIGHT = {
    "profile": [
        *("--model=tiny", "--method=standard", "--batch-size=1", "--seq-len=4", "--output=x.json")
    ],
    "verify": ["--method=standard"],
    "ceilings": ["--device=cpu", "--output=x.json"],
    "advise": [*ASKED, *HERE],
    "budget": [*ASKED, *HERE, "--samples=9", "--tokens=8000", "--epsilon=8", "--delta=0.01"],
    "report": ["--tables=no", "--output-dir=r"],
    "figure": ["--figure=tradeoff", "--tables=no", "--output=x.png"],
}
"""Options; those of a case come after them, and a later one counts."""

OUTPUTS = dict.fromkeys(("profile", "verify", "ceilings", "figure"), "--output")
OUTPUTS |= {"advise": "--json", "budget": "--json"}


def test_bad_options_are_one_sentence_and_nothing_runs(tmp_path) -> None:
    def refusal_of(line: str) -> str:
        command, *options = shlex.split(line)
        done = call(command, *RIGHT.get(command, []), *options, cwd=tmp_path)
        told = [one for one in done.stderr.splitlines() if not one.startswith("dpprof: no CUDA")]
        *usage, said = told
        assert list(tmp_path.iterdir()) == []
        assert done.returncode == (2 if usage else 1)
        return said

    assert_sentences("cli/options", refusal_of)


IN_THE_WAY = {"is a device, a pipe or a socket": (22, os.mkfifo), "is a folder": (21, Path.mkdir)}


@pytest.mark.parametrize("what", IN_THE_WAY)
@pytest.mark.parametrize("command", OUTPUTS)
def test_an_output_that_cannot_be_written_is_found_out_first_and_stays(
    tmp_path, command, what
) -> None:
    number, make = IN_THE_WAY[what]
    place = tmp_path / "x.json"
    make(place)
    before = place.stat().st_mode
    model = ["--model=tiny"] if command == "verify" else []
    done = call(command, *RIGHT[command], *model, f"{OUTPUTS[command]}=x.json", cwd=tmp_path)

    assert done.returncode == 1
    (said,) = [line for line in done.stderr.splitlines() if not line.startswith("dpprof: no CUDA")]
    assert said == f"error: [Errno {number}] {what}, not a file to write: 'x.json'"
    assert place.stat().st_mode == before
    assert list(tmp_path.iterdir()) == [place]
