"""Speed and price over the number of GPUs."""

from factory import make_capacity, make_experiment, tables_of_runs, write_synthetic_verdict

from dpprof.results.figures.prices import draw_ranks as draw


def on_ranks(method, step_s, size=1, kind="fsdp", **axes):
    """A capacity result on so many H200s."""
    ranks = None if size == 1 else {"kind": kind, "world_size": size}
    axes |= {"method": method, "parallel": ranks}
    experiment = make_experiment(device="cuda", target="h200", **axes)
    return experiment, "capacity", {"recorded": make_capacity(step_s)}


def lines_of(axis):
    return {line.get_label(): line.get_xdata().tolist() for line in axis.lines}


def test_each_kind_of_ranks_has_its_line(tmp_path) -> None:
    runs = [
        on_ranks("flash-bk", 1.0, size, kind)
        for size, kind in ((1, "fsdp"), (2, "fsdp"), (2, "ddp"), (4, "ddp"))
    ]
    figure = draw(tables_of_runs(tmp_path, *runs))

    assert lines_of(figure.axes[0]) == {"flash-bk, ddp": [1, 2, 4], "flash-bk, fsdp": [1, 2]}


def test_a_method_that_failed_verification_is_not_drawn(tmp_path) -> None:
    runs = [on_ranks(name, 1.0, size) for name in ("flash-bk", "flash") for size in (1, 2)]
    write_synthetic_verdict(tmp_path, runs[2][0], passed=False, reason="wrong")

    assert set(lines_of(draw(tables_of_runs(tmp_path, *runs)).axes[0])) == {"flash-bk"}


def test_trainings_without_a_time_are_counted_and_spoken_of(tmp_path) -> None:
    runs = [
        on_ranks("flash-bk", step_s, size, seq_len=length)
        for length, step_s in ((4, 1.0), (8, None))
        for size in (1, 2)
    ]
    figure = draw(tables_of_runs(tmp_path, *runs))

    assert len(figure.axes) == 2  # speed and hours of the only training with a time
    assert figure.get_suptitle().startswith("1 more panel is left out")
    assert figure.get_label().endswith(
        "1 GPU for V16-d8-L1-H2, T = 4 on h200; 1 GPU for V16-d8-L1-H2, T = 8 on h200."
    )


def test_images_are_not_called_tokens(tmp_path) -> None:
    image = {"model": "vit-b16", "seq_len": None}
    runs = [on_ranks("flash-bk", 1.0, size, **image) for size in (1, 2)]
    figure = draw(tables_of_runs(tmp_path, *runs))

    labels = [axis.get_ylabel() for axis in figure.axes]
    assert labels == ["samples/s of all GPUs", "GPU hours per 10\u2079 samples"]
