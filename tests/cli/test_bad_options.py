"""What each command refuses, in one sentence and before anything runs."""

import os
from pathlib import Path

import pytest
from scripts import ASKED, HERE, call

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

REFUSED = {
    "profile": {
        "--method: 'opacus_ghost' is not allowed; did you mean 'opacus-ghost'? allowed:": [
            "--method=opacus_ghost"
        ],
        "--model: '../../etc' is not allowed; allowed: 1b, medium, opacus-cnn, resnet20-gn, "
        "resnet50-gn, small, tiny, vit-b16, wrn-16-4, wrn-40-4": ["--model=../../etc"],
        "--model: missing vocab_size, d_model, heads": ["--model={layers: 1}"],
        "--model: '{layers: [' is not allowed; it must be a": ["--model={layers: ["],
        "--model.layers: 0": ["--model={layers: 0, vocab_size: 9, d_model: 8, heads: 1}"],
        "--batch-size: '0' is not allowed; it must be greater": ["--batch-size=0"],
        "--dtype: 'half' is not allowed; it must be 'float32'": ["--dtype=half"],
        "--device: 'tpu' is not allowed; it must be 'cpu' or 'cuda'": ["--device=tpu"],
        "--instrument: 'clear' is not allowed; did you mean": ["--instrument=clear"],
        "--spec is the whole experiment; leave out --model, --method": ["--spec=x"],
        "--target: 'h200' is not allowed; the instrument clean measures this machine and takes no "
        "target; instruments with a target: estimate, capacity\n": ["--target=h200"],
        "--max-wait-s: 'soon' is not allowed; it must be a number of seconds": [
            "--max-wait-s=soon"
        ],
        "argument --threads: '0' is not allowed; it must be 1, 2, 3 ...": ["--threads=0"],
        "argument --threads: 'two' is not allowed; it must be": ["--threads=two"],
    },
    "verify": {
        "--method: 'opacus-gost' is not allowed; did you mean 'opacus-ghost'": [
            *("--model=small", "--method=opacus-gost")
        ],
        "--lora: only for hf:NAME, a Hugging Face model": ["--model=tiny", "--lora=rank=8"],
        "--lora.rank: '0' is not allowed; it must be": ["--model=hf:tiny-llama", "--lora=rank=0"],
        "--model: 'hf:tiny-lama' is not allowed; after hf: comes": ["--model=hf:tiny-lama"],
        "--padding.fraction: '2' is not allowed": ["--model=hf:tiny-llama", "--padding=2"],
        "--model: 'tinny' is not allowed; did you mean 'tiny'": ["--model=tinny"],
        "[Errno 2] No such file or directory: 'no.json'": ["--stand-in=no.json"],
    },
    "ceilings": {
        "argument --operators-s: '0' is not allowed; it must be a whole number from 1 to 86400": [
            "--operators-s=0"
        ],
        "[Errno 2] No such file or directory: 'nowhere.json'": ["--operators-of", "nowhere.json"],
    },
    "prune": {"[Errno 2] No such file or directory: 'nowhere.yaml'": ["nowhere.yaml"]},
    "tables": {"[Errno 2] No": ["--manifest", "no.json", "--output-dir", "t"]},
    "report": {"[Errno 2] No such": []},
    "figure": {
        "--figure: 'tradeof' is not allowed; did you mean 'tradeoff'? allowed: agreement": [
            "--figure=tradeof"
        ],
        "argument --output: 'f\\x1b.xyz' is not allowed; its ending must be one of these; allowed: "
        ".json, .pdf, .png, .svg\n": ["--output=f\x1b.xyz"],
    },
    "advise": {
        "argument --figure: 'x.jpg' is not allowed; its ending must be one of these; allowed: .pdf,"
        " .png, .svg\n": ["--figure=x.jpg"],
    },
    "forget": {
        "argument --outcome: 'ok' is not allowed; allowed: crashed, killed, oom, timeout, unsup": [
            "--outcome=crashed,ok"
        ],
    },
}
"""Options by command and by the beginning of the sentence that refuses them."""

OUTPUTS = dict.fromkeys(("profile", "verify", "ceilings", "figure"), "--output")
OUTPUTS |= {"advise": "--json", "budget": "--json"}
CASES = [(name, *case) for name, cases in REFUSED.items() for case in cases.items()]
CASES += [
    (name, f"argument {option}: '' is not allowed; it must be a path\n", [f"{option}="])
    for name, option in OUTPUTS.items()
]


@pytest.mark.parametrize(("command", "sentence", "options"), CASES)
def test_bad_options_are_one_sentence_and_nothing_runs(
    tmp_path, command, sentence, options
) -> None:
    done = call(command, *RIGHT.get(command, []), *options, cwd=tmp_path)
    lines = done.stderr.splitlines(keepends=True)
    *usage, said = [line for line in lines if not line.startswith("dpprof: no CUDA")]

    by_parser = sentence.startswith("argument")
    assert said.startswith(
        f"dpprof {command}: error: {sentence}" if by_parser else f"error: {sentence}"
    )
    assert (done.returncode, bool(usage)) == ((2, True) if by_parser else (1, False))
    assert list(tmp_path.iterdir()) == []


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
