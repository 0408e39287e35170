"""The command ``dpprof``: what it lists, what it refuses, and one subcommand of each sort."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from fresh_process import ROOT, run_fresh

import dpprof
from dpprof.ask.commands.main import COMMANDS, EXTRAS, import_command, main


def test_help_lists_every_subcommand_and_each_has_its_own(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    listed = capsys.readouterr().out

    for name in COMMANDS:
        assert f"  {name} " in listed
        with pytest.raises(SystemExit) as ended:
            import_command(name).main(["--help"])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: dpprof {name} ")


def test_no_or_an_unknown_subcommand_is_an_error(capsys) -> None:
    for given in ([], ["estimat\x1b[31m"]):
        with pytest.raises(SystemExit) as ended:
            main(given)
        assert ended.value.code == 2

    out, error = capsys.readouterr()
    assert out.startswith("usage: dpprof COMMAND")
    assert "\x1b" not in error
    assert "did you mean 'estimate'?" in error
    assert error.count("\n") == 1


def test_an_option_of_other_trainers_is_refused_by_the_closest_question(capsys) -> None:
    with pytest.raises(SystemExit):
        import_command("estimate").main(["--activation-offloading", "true"])

    assert "not allowed; closest: checkpointing non-reentrant" in capsys.readouterr().err


def test_a_missing_extra_is_one_sentence() -> None:
    code = """
import contextlib, io, sys
sys.modules |= {"matplotlib": None, "jinja2": None}  # what an import finds that is not installed
from dpprof.ask.commands.main import EXTRAS, main
for name in EXTRAS:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            main([name, "--help"])
        except SystemExit as ended:
            print(ended.code, said.getvalue(), end="")
"""
    said = run_fresh(code).splitlines()
    for name, line in zip(EXTRAS, said, strict=True):
        assert re.fullmatch(
            rf"1 dpprof {name}: error: (matplotlib|jinja2)\S* is not installed; "
            r"pip install 'dpprof\[report\]'",
            line,
        )


def test_the_version_is_that_of_the_package(capsys) -> None:
    """As installed, and the commit that a checkout is at now."""
    main(["--version"])
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True)[:9]

    said = rf"dpprof {re.escape(dpprof.__version__)} \(commit {commit}(, edited)?\)\n"
    assert re.fullmatch(said, capsys.readouterr().out)


def test_an_estimate_is_told_and_kept(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = "{vocab_size: 16, d_model: 8, layers: 1, heads: 2}"
    given = ["--model", model, "--method", "flash-bk", "--batch-size=3", "--seq-len=4"]

    main(["estimate", *given, "--target=h100", "--device=cuda"])

    said = capsys.readouterr().out
    (path,) = (tmp_path / "results" / "estimate").glob("*.r0.json")
    found = json.loads(path.read_text())
    peak = found["memory"]["peak_allocated_bytes"]
    assert said.startswith("flash-bk, 3 x 4 tokens, bfloat16, adamw-fused, CUDA graph\n")
    assert f"peak    {peak / 2**20:.2f} MiB allocated, in " in said
    assert f"{found['compute']['dp_flop_multiplier']:.2f} times what the model needs" in said
    step = found["time"]["predicted_step_s"]
    assert 0 < step["low"] < step["median"] < step["high"]
    assert f"time    {step['median'] * 1e3:,.1f} ms a step (90 % interval " in said
    assert f"at least {found['compute']['roofline_step_s'] * 1e3:,.1f} ms by the roof" in said


@pytest.mark.parametrize(
    ("limit", "begins"), [("1MiB", "memory  out of memory of"), (None, "peak")]
)
def test_a_step_that_does_not_fit_says_so_first(
    limit, begins, capsys, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = "{vocab_size: 16, d_model: 8, layers: 1, heads: 2}"
    given = ["--model", model, "--method", "flash-bk", "--batch-size=3", "--seq-len=4"]
    given += [] if limit is None else [f"--memory-limit-bytes={limit}"]
    main(["estimate", *given, "--target=h100", "--device=cuda"])
    assert capsys.readouterr().out.splitlines()[1].startswith(begins)


def test_an_estimate_that_cannot_be_made_says_why(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--model=tiny", "--method=standard", "--batch-size=1", "--seq-len=4", "--dtype=tf32"]
    with pytest.raises(SystemExit) as ended:
        main(["estimate", *given, "--device=cpu"])

    assert ended.value.code == 1
    assert "tf32 is a mode of CUDA" in capsys.readouterr().err


def test_a_reader_that_has_enough_ends_the_command_in_silence() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", "from dpprof.ask.commands.main import main; main(['--help'])"],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)

    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
