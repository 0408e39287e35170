"""What each command refuses, in one sentence and before anything runs."""

import os
import shlex
from pathlib import Path

import pytest
from scripts import ASKED, HERE, call
from snapshots import assert_sentences

RIGHT = {
    "profile": [
        *("--model=tiny", "--method=standard", "--batch-size=1", "--seq-len=4", "--output=x.json"),
    ],
    "verify": ["--method=standard"],
    "ceilings": ["--device=cpu", "--output=x.json"],
    "advise": [*ASKED, *HERE],
    "budget": [*ASKED, *HERE, "--samples=9", "--tokens=8000", "--epsilon=8", "--delta=0.01"],
    "report": ["--tables=no", "--output-dir=r"],
    "figure": ["--figure=tradeoff", "--tables=no", "--output=x.png"],
}
"""Options, of which a later one counts."""

REFUSED = [
    "profile --method=opacus_ghost",
    "profile --model=../../etc",
    "profile '--model={layers: 1}'",
    "profile '--model={layers: ['",
    "profile '--model={layers: 0, vocab_size: 9, d_model: 8, heads: 1}'",
    "profile --batch-size=0",
    "profile --dtype=half",
    "profile --device=tpu",
    "profile --instrument=clear",
    "profile --spec=x",
    "profile --target=h200",
    "profile --max-wait-s=soon",
    "profile --threads=0",
    "profile --threads=two",
    "verify --model=small --method=opacus-gost",
    "verify --model=tiny --lora=rank=8",
    "verify --model=hf:tiny-llama --lora=rank=0",
    "verify --model=hf:tiny-lama",
    "verify --model=hf:tiny-llama --padding=2",
    "verify --model=tinny",
    "verify --stand-in=no.json",
    "ceilings --operators-s=0",
    "ceilings --operators-of nowhere.json",
    "prune nowhere.yaml",
    "tables --manifest no.json --output-dir t",
    "report",
    "figure --figure=tradeof",
    "figure '--output=f\x1b.xyz'",
    "advise --figure=x.jpg",
    "forget --outcome=crashed,ok",
]
"""Commands with options that come after the right ones."""

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

    without = [f"{command} {option}=" for command, option in OUTPUTS.items()]
    assert_sentences("cli/options", refusal_of, [*REFUSED, *without])


IN_THE_WAY = {
    "is a device, a pipe or a socket": (22, os.mkfifo),
    "is a folder": (21, Path.mkdir),
}


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
