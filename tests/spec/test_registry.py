import pytest
from fresh_process import ROOT, run_fresh

from dpprof.experiments.config import registry
from dpprof.experiments.config.tasks import OWN_IMAGE_SIZES
from dpprof.experiments.config.validation import InputError


def test_own_names_are_declared() -> None:
    assert set(registry.names("models")) == set(OWN_IMAGE_SIZES)
    methods = registry.names("methods")
    assert {"standard", "microbatch", "opacus-hooks", "opacus-ghost"} <= set(methods)
    assert "test-dies" not in methods  # another package's, which is not installed


@pytest.mark.parametrize("group", ["models", "methods", "instruments", "figures"])
def test_everything_declared_can_be_loaded_and_has_a_source_file(group) -> None:
    for name in registry.names(group):
        loaded = registry.load(group, name)
        module = getattr(loaded, "__module__", "dpprof.subjects.models.presets")
        assert registry.source_file(group, name).stem in {
            module.split(".")[-1],
            "presets",
            "recurrent",
        }


@pytest.mark.parametrize(
    ("group", "name", "meant", "first"),
    [
        ("methods", "opacus-hook", "opacus-hooks", "flash"),
        ("models", "llama-3.1-8b", "hf:llama-3.1-8b", "1b"),
    ],
)
def test_an_unknown_name_is_one_sentence(group, name, meant, first) -> None:
    with pytest.raises(InputError) as caught:
        registry.check(group, name, "--name")

    assert str(caught.value).startswith(
        f"--name: {name!r} is not allowed; did you mean {meant!r}? allowed: {first}"
    )


def test_a_plugin_is_found_without_importing_it_or_torch() -> None:
    code = (
        "import sys; from dpprof.experiments.config import registry as c;"
        "print('test-dies' in c.names('methods'), c.source_file('methods', 'test-dies').name,"
        " c.distribution_of('methods', 'test-dies'),"
        " 'torch' in sys.modules, 'dpprof_test_methods' in sys.modules)"
    )

    assert run_fresh(code, plugin=ROOT / "tests" / "plugin") == (
        "True dpprof_test_methods.py dpprof-test-methods 1.0 False False"
    )
