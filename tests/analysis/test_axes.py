"""What is told of an experiment by its axes."""

from factory import make_experiment

from dpprof.results.analysis.tables.axes import axes_of, count_tokens, name_model

MODEL = {"model": "hf:tiny-llama", "batch_size": 4, "seq_len": 100}


def test_tokens_leave_padding_out() -> None:
    for padding, tokens in ((None, 400), (0.25, 300)):
        experiment = make_experiment(**MODEL, padding=padding)

        assert count_tokens(axes_of(experiment)) == experiment.tokens_in(4) == tokens


def test_adapters_are_told_with_the_model() -> None:
    adapted = axes_of(make_experiment(**MODEL, lora="rank=4,target_modules=all-linear"))

    assert adapted["lora"] == "rank 4, alpha 8, all-linear"
    assert name_model(adapted) == "hf:tiny-llama with LoRA"
    assert name_model(axes_of(make_experiment(**MODEL))) == "hf:tiny-llama"
