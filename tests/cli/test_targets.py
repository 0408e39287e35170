"""The list of GPUs has what is declared, with its limits and other names."""

from dpprof.ask.commands.targets import main
from dpprof.experiments.config import registry


def test_every_target_is_listed_with_its_limits(capsys) -> None:
    main([])
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:4] for line in lines}

    assert rows["t4"] == ["14.4", "320.0", "65.0"]  # of float16, which a T4 has units for
    assert rows["h100"] == ["78.6", "3,350.0", "989.4"]
    assert "a100-80gb" in " ".join(lines)
    told = " ".join(lines).replace(",", " ").replace(";", " ").replace(".", " ").split()
    assert set(registry.names("targets")) - {"cpu"} <= set(told)
    assert max(map(len, lines)) <= 100
