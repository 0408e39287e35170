"""Say which private method to use on a GPU that need not be here, and what that rests on."""

from collections.abc import Sequence
from pathlib import Path

from dpprof.analysis.advice import Advice, advise
from dpprof.analysis.axes import target_text
from dpprof.analysis.standings import DAGGER, DOUBLE_DAGGER, Marks, read_standings, sign
from dpprof.cli.capacities import answer
from dpprof.planning.code_digest import verdict_digest
from dpprof.records.result import Result
from dpprof.spec.experiment import Experiment
from dpprof.spec.mechanisms import is_other_mechanism


def _number(value: float | None, form: str, otherwise: str = "unknown") -> str:
    return otherwise if value is None else format(value, form)


def tell(advice: Advice) -> str:
    """Say the advice, for people."""
    best = advice.best
    where = f"{advice.model}, {advice.seq_len:,} tokens, {advice.dtype}, on {advice.target}"
    if any(option.verdict == "unranked" for option in advice.options):
        said = [f"The ceilings are not known, so methods that fit are not ranked: {where}."]
    elif best is None:
        wrong = any(option.verdict == "wrong" for option in advice.options)
        said = [f"No private method {'can be advised' if wrong else 'safely fits'}: {where}."]
    else:
        close = [option.method for option in advice.options if option.verdict == "close"]
        said = [f"Use {best.method} with batches of {best.safe_batch_size}: {where}."]
        if close:
            said.append(f"Too close to tell apart from it: {', '.join(close)}.")
    marks: Marks = {
        DAGGER: [option.method for option in advice.options if not option.verified],
        DOUBLE_DAGGER: [
            option.method for option in advice.options if is_other_mechanism(option.mechanism)
        ],
    }
    names = {option.method: option.method + sign(option.method, marks) for option in advice.options}
    width = max(len("method"), *map(len, names.values()))
    said.append(f"{'method':{width}}  {'verdict':12}  safe batch  tokens/s at most  FLOPs x")
    for option in advice.options:
        row = f"{names[option.method]:{width}}  {option.verdict:12}"
        if option.message is not None:
            said.append(f"{row}  {option.message}")
            continue
        cells = (
            _number(option.safe_batch_size, ",", "none").rjust(len("safe batch")),
            _number(option.tokens_per_s_at_most, ",.0f").rjust(len("tokens/s at most")),
            _number(option.dp_flop_multiplier, ".2f").rjust(len("FLOPs x")),
        )
        said.append("  ".join([row, *cells]))
    if marks[DAGGER]:
        said.append(
            f"{DAGGER} Not verified here to compute the right gradient; "
            "dpprof verify --output results/verify/<model>-<method>.json does."
        )
    if marks[DOUBLE_DAGGER]:
        said.append(f"{DOUBLE_DAGGER} Another mechanism than flat clipping; docs/methods.md.")
    said += [f"Memory: {advice.sure_of_memory}.", f"Time: {advice.sure_of_time}."]
    return "\n".join(said)


def judge(experiments: Sequence[Experiment], results: Sequence[Result]) -> tuple[str, str, bool]:
    """Return the methods in order, as far as their verdicts are known here."""
    standings = read_standings(Path(), experiments, verdict_digest)
    advice = advise(results, target_text(experiments[0]) or "this machine", standings)
    fits = any(option.safe_batch_size for option in advice.options)
    return advice.model_dump_json(indent=1), tell(advice), fits


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    answer(argv, "advise", __doc__, judge)
