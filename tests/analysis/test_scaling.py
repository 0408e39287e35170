"""What more GPUs bring, from figures that are given."""

import pandas as pd
import pytest
from factory import make_parts

from dpprof.ask.advice_text import format_gpus
from dpprof.experiments.records.advice import Advice, Option
from dpprof.results.analysis.advice.advice import compare_gpus, find_fastest
from dpprof.results.figures.prices import draw_ranks as draw

SPEEDS = {
    1: {"standard": 1000.0, "flash": None, "flash-bk": None},
    2: {"standard": 1800.0, "flash": 1000.0, "flash-bk": None},
    4: {"standard": 3000.0, "flash": 1600.0, "flash-bk": 2000.0},
}


def option(method: str, speed: float | None, verdict: str = "slower", **others) -> Option:
    fits = {"safe_batch_size": 8, "tokens_per_s": speed} if speed else {}
    fits |= {"tokens_per_s_low": speed / 2, "tokens_per_s_high": speed * 2} if speed else {}
    return Option(method=method, verdict=verdict, private=method != "standard", **fits | others)


def advise() -> list[Advice]:
    named = {"model": "hf-m", "dtype": "bfloat16", "target": "h100", "budget_bytes": None}
    told = {"sure_of_memory": "", "sure_of_time": "", "seq_len": 4096}
    return [
        Advice(
            gpus=gpus,
            parallel=None if gpus == 1 else f"fsdp x{gpus}",
            options=[option(*one) for one in speeds.items()],
            **named | told,
        )
        for gpus, speeds in reversed(SPEEDS.items())
    ]


def test_efficiency_is_against_the_fewest_gpus_that_train_with_the_method() -> None:
    found = {(one.method, one.gpus): one for one in compare_gpus(advise())}

    assert found["standard", 4].efficiency == pytest.approx(0.75)
    assert found["flash", 4].efficiency == pytest.approx(0.8)
    assert (found["flash", 4].fewest_gpus, found["flash-bk", 4].efficiency) == (2, 1.0)
    # 500 tokens a second of each GPU are 1.8 million in an hour.
    assert found["flash", 2].gpu_hours_per_billion == pytest.approx(1e9 / 1.8e6)
    assert ("flash", 1) not in found


def test_a_wrong_method_is_on_no_number_of_gpus() -> None:
    [two] = [one for one in advise() if one.gpus == 2]
    wrong = two.model_copy(update={"options": (option("flash", 1000.0, "wrong"),)})

    assert compare_gpus([wrong]) == []


def test_the_cheapest_the_fastest_and_the_smallest_number_are_named() -> None:
    found = compare_gpus(advise())

    assert [(one.gpus, one.method) for one in find_fastest(found)] == [
        (2, "flash"),
        (4, "flash-bk"),
    ]
    said, others, about, header, *rows = format_gpus(found, advise()).splitlines()
    assert said.startswith("Cheapest: flash on 2 GPUs (bfloat16, adamw, eager), 556 GPU hours for")
    assert others.endswith("flash-bk on 4 GPUs, 2,000 tokens/s. Smallest: flash on 2 GPUs.")
    assert about.startswith("Asked: ")
    assert header.split()[:3] == ["GPUs", "method", "batch"]
    assert rows[1].split()[:3] == ["4", "flash-bk\N{DAGGER}", "8"]


@pytest.mark.parametrize(("exchange_s", "said"), [(0.1, "; 2 may be as cheap"), (2.0, "")])
def test_numbers_of_gpus_that_may_be_as_cheap_are_named(exchange_s, said) -> None:
    """Errors of both are independent: by what ranks wait, their ratio is 1.03 or 1.5."""
    alone = make_parts({"gemm": 4.0})
    waiting = alone.each._replace(exchange=exchange_s, seconds=4.0 + exchange_s)
    one, two = (
        advice.model_copy(update={"options": (option("flash", speed, parts=parts),)})
        for advice, speed, parts in zip(
            sorted(advise(), key=lambda one: one.gpus)[:2],
            (1000.0, 2000.0 * alone.seconds / waiting.seconds),
            (alone, alone._replace(each=waiting, device="2 x h100")),
            strict=True,
        )
    )

    told = " ".join(format_gpus(compare_gpus([one, two]), [one, two]).split())
    assert f"278 GPU hours for a billion tokens{said}." in told


def test_where_no_speed_is_predicted_batches_are_said() -> None:
    silent = [one.model_copy(update={"options": (option("flash", None),)}) for one in advise()]

    first, header, *rows = format_gpus(compare_gpus(silent), silent).splitlines()
    assert first.startswith("The fastest private method with its largest safe batch (")
    assert header.split()[:4] == ["dtype", "tokens", "ranks", "method"]
    assert rows


def draw_of(advices):
    named = {"model", "target", "parallel", "seq_len", "dtype"}
    rows = pd.DataFrame(
        one.model_dump(include=named) | option.model_dump()
        for one in advices
        for option in one.options
    )
    return draw({"advice": rows, "runs": rows.assign(parameters_total=10)})


def trainings(**speeds) -> list[Advice]:
    """On 1 and 2 GPUs, the speeds of flash in each training; None where it does not fit."""
    return [
        one.model_copy(update={"model": name, "options": (option("flash", speed),)})
        for name, of_each in speeds.items()
        for one, speed in zip(reversed(advise()), of_each, strict=False)
    ]


def test_each_training_has_its_own_number_of_gpus() -> None:
    wrong = option("opacus-ghost", 100.0, "wrong")
    told = trainings(tiny=(1000.0, 1800.0), small=(900.0, 500.0), wide=(None, 500.0))
    told[4] = told[4].model_copy(update={"options": (wrong,)})

    # Of wide only one number is left to compare: on one GPU its only method is wrong.
    assert draw_of(told).get_label() == (
        "Private training takes at least 1 GPU for small, T = 4,096 on h100; 1 GPU for tiny, "
        "T = 4,096 on h100."
    )


def test_a_training_without_times_has_no_panel_where_another_has_times() -> None:
    untimed = option("flash", 1.0).model_copy(update={"tokens_per_s": None})
    told = trainings(tiny=(1000.0, 1800.0), small=(1.0, 1.0))
    told[2:] = [one.model_copy(update={"options": (untimed,)}) for one in told[2:]]

    assert [axis.get_title() for axis in draw_of(told).axes] == ["tiny, T = 4,096 on h100", ""]
    (axis,) = draw_of(told[2:]).axes
    assert axis.get_ylabel() == "samples on each GPU"


def test_panels_that_are_left_out_are_counted() -> None:
    told = trainings(**dict.fromkeys("abcde", (1000.0, 1800.0)))

    assert draw_of(told).get_suptitle().startswith("2 more panels are left out")


def test_lines_are_tokens_a_second_and_gpu_hours_over_gpus() -> None:
    figure = draw_of(advise())

    speed, cost = figure.axes
    lines = {line.get_color(): line for line in speed.lines if len(line.get_xdata()) > 1}
    assert max(len(line.get_xdata()) for line in lines.values()) == 3
    standard = max(lines.values(), key=lambda line: max(line.get_ydata()))
    assert list(standard.get_xdata()) == [1, 2, 4]
    assert list(standard.get_ydata()) == [1000, 1800, 3000]
    hours = [line for line in cost.lines if list(line.get_xdata()) == [1, 2, 4]]
    assert list(hours[0].get_ydata()) == pytest.approx([1e9 / 3.6e6, 2e9 / 6.48e6, 4e9 / 1.08e7])
