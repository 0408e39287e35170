"""Configs and command lines that nobody should accept, drawn at random.

Every one begins as what is right and gets one thing wrong, so it is known that it must be
refused. What is wrong is drawn at random, and so is where.
"""

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import yaml

TEXTS = ["", " ", "\x1b[2J\x1b]0;x\x07", "\u202egnp", "'; touch pwned; '", "$(touch pwned)"]
TEXTS += [
    "../../etc/passwd",
    "<script>",
    "{{ 7 }}",
    "%n%s",
    "\\input{x}",
    "a" * 100_000,
    "\N{SNAKE}",
]
NO_NUMBER = [*TEXTS, "1,5", "4-8", "100%", "0x10", "1__0", "one", "--1", "inf", "nan", "-1", -1]
NO_NUMBER += [True, [[1]], {"a": 1}, float("nan"), float("inf"), -(10**400)]
NO_COUNT = [*NO_NUMBER, 0, "0", 1.5, "1.5", 10**10, "9" * 400, 10**400, "4GiB", "1e3", None]
NO_SIZE = [
    *NO_NUMBER,
    0,
    4.5,
    "4,000MiB",
    "79,1GiB",
    "4-8GiB",
    "4GiB; rm -rf /",
    "4 lots",
    "9" * 400,
]
NO_NAME = [*TEXTS, "Tiny", "opacus_ghost", "Standard", "nobody", 1, 1.5, True, None, [["x"]], -1]
UNEVEN = {"vocab_size": 9, "d_model": 8, "layers": 1, "heads": 3}
BY_KEY: dict[str, list[Any]] = {
    "model": [
        *NO_NAME,
        {},
        {"layers": 1},
        {"vocab_size": 9, "d_model": 8, "layers": 1, "heads": 3},
        *(f"hf:{text}" for text in TEXTS),
        "hf:llama-3.1-9b",
        "hf:nothing.json",
        {"hf": 1},
        {"hf": "tiny-llama", "auto_map": {"AutoModel": "evil.Evil"}},
    ],
    "lora": [*NO_NUMBER, *TEXTS, {}, {"rank": 0}, {"rank": 1, "alpha": 0}, {"rank": [1]}, 4],
    "trainable": ["((", "lora", "", 1, True, {}, [["x"]]],
    "padding": [*NO_NUMBER, {}, 1, 0.5, {"fraction": "\x1b[2J"}],
    "parameters_dtype": [*NO_NAME, "bfloat16", "half", {}],
    "busy_gpu": [*NO_NAME, "wait", True, {}],
    "method": [*NO_NAME, {}],
    "batch_size": NO_COUNT,
    "seq_len": NO_COUNT,
    "warmup_steps": NO_COUNT,
    "timed_steps": NO_COUNT,
    "seed": [*NO_NUMBER, 2**32, 1.5, None],
    "dtype": [*NO_NAME, "half", {}],
    "optimizer": [*NO_NAME, {}],
    "attention": [*NO_NAME, {}],
    "checkpointing": [*NO_NAME, {}],
    "device": [*NO_NAME, "tpu", {}],
    "max_grad_norm": [*NO_NUMBER, 0, None],
    "noise_multiplier": [*NO_NUMBER, None],
    "learning_rate": [*NO_NUMBER, 0, None],
    "timeout_s": [*NO_NUMBER, 0, "15 min", None],
    "memory_limit_bytes": NO_SIZE,
    "instruments": [*NO_NAME, {}],
    "replicates": [*NO_COUNT, 1001, [1]],
    "target": [name for name in NO_NAME if name is not None]
    + [{}, {"memory_bytes": "1GiB"}, {"memory_bytes": 1, "\x1b[2J": 1}],
}
NO_WHOLE = [one for one in NO_COUNT if one not in ("1e3", 10**10)]
PRIVACY: dict[str, list[Any]] = {
    "samples": NO_WHOLE,
    "tokens": NO_WHOLE,
    "epsilon": [*NO_NUMBER, 0, "0", [], [8, 0], None],
    "delta": [*NO_NUMBER, 0, 1, "1", None],
    "batch_size": [*(one for one in NO_WHOLE if one is not None), 10_001],
    "least_steps": NO_WHOLE,
    "accountant": [*NO_NAME, "gdp"],
    "price_per_hour": [*NO_NUMBER],
}
"""Wrong values by key of a privacy budget."""

RIGHT_BUDGET = {"samples": 10_000, "tokens": "4e6", "epsilon": 8, "delta": 1e-5}
RIGHT = {
    "defaults": {"model": "tiny", "seq_len": 8, "device": "cpu"},
    "sweeps": {
        "one": {"method": ["standard", "flash"], "batch_size": [1, 2], "instruments": "clean"},
        "two": {"method": "standard", "batch_size": 4, "memory_limit_bytes": "4GiB"},
    },
    "exclude": [{"method": "flash", "batch_size": 2}],
}


def _dump(config: Any) -> bytes:
    return yaml.dump(config, allow_unicode=False, sort_keys=False).encode()


def _with_value(draw: random.Random) -> bytes:
    """Give one key a value that it cannot have."""
    config = copy.deepcopy(RIGHT)
    key = draw.choice(list(BY_KEY))
    value = draw.choice(BY_KEY[key])
    places = [config["defaults"], *config["sweeps"].values()]
    # An exclude names what to leave out, so what is wrong with an experiment need not be there.
    if key not in ("instruments", "replicates") and value != "lora":
        places.append(config["exclude"][0])
    listed = key != "replicates" and not isinstance(value, list) and draw.random() < 0.3
    place = draw.choice(places)
    place[key] = [value] * draw.choice([1, 1, 50]) if listed else value
    return _dump(config)


def _with_budget(draw: random.Random) -> bytes:
    """Give a privacy budget a value that it cannot have."""
    config: dict[str, Any] = copy.deepcopy(RIGHT)
    config["sweeps"]["two"] |= {"instruments": "capacity", "target": "h200"}
    key = draw.choice(list(PRIVACY))
    config["privacy"] = RIGHT_BUDGET | {key: draw.choice(PRIVACY[key])}
    return _dump(config)


def _with_key(draw: random.Random) -> bytes:
    """Use a key that does not exist."""
    config: dict[str, Any] = copy.deepcopy(RIGHT)
    places = [config, config["defaults"], config["sweeps"]["one"], config["exclude"][0]]
    place = draw.choice(places)
    key = draw.choice([*TEXTS, "bath_size", "METHOD", 1, None, True, 1.5])
    place[key] = draw.choice([1, None, {}, "x"])
    return _dump(config)


def _without(draw: random.Random) -> bytes:
    """Leave out what is required, or put something else in its place."""
    config: dict[str, Any] = copy.deepcopy(RIGHT)
    wrong: list[Any] = [None, 1, "x", [], [1], True]
    how = draw.randrange(4)
    if how == 0:
        del config["defaults"][draw.choice(["model", "seq_len"])]
    elif how == 1:
        del config["sweeps"]["two"][draw.choice(["method", "batch_size"])]
    elif how == 2:
        config[draw.choice(["defaults", "sweeps"])] = draw.choice([*wrong, {}])
    else:
        config["sweeps"]["two"] = draw.choice(wrong)
    return _dump(config)


def _with_line(draw: random.Random) -> bytes:
    """Add a line that cannot be read, is read twice, or has Snakemake execute it."""
    lines = _dump(RIGHT).splitlines()
    bad = [b"sweeps: {}", b"defaults: {model: tiny}", b"__use_yte__: true"]
    bad += [b"<<: {__use_yte__: 1}", b"x: !!python/object/apply:os.system [touch pwned]"]
    bad += [b"x: \xff\xfe", b"x: [1", b"x: \x00", b"x: 010", b"x: 4:00", b"%YAML 9.9", b"x: @"]
    bad += [b"x: " + bracket * 100_000 for bracket in (b"[", b"{", b"- ")]
    bad += [b"x: " + b"9" * 10_000, b"x: 2024-99-99", b"x: &a [*a]", b"x: *nowhere", b"\tx: 1"]
    bad += [b"x: [" + b"1, " * draw.choice([150_000, 1_000_000]) + b"]", b"? [1]\n: 2", b"--- 1"]
    bad += [_bomb(b"[%s]"), _bomb(b"{<<: [%s]}")]
    lines.insert(draw.choice([0, len(lines)]), draw.choice(bad))
    return b"\n".join(lines)


def _bomb(shape: bytes) -> bytes:
    """Stand for billions of values in few lines."""
    first = b"xa: &a " + (b"{k: 1}" if b"<<" in shape else b"[1]")
    names = [b"%c" % letter for letter in b"abcdefghijk"]
    pairs = itertools.pairwise(names)
    return b"\n".join(
        [first, *(b"x%s: &%s " % (n, n) + shape % b", ".join([b"*" + m] * 9) for m, n in pairs)]
    )


def _too_many(draw: random.Random) -> bytes:
    """Ask for far more runs than there may be."""
    config = copy.deepcopy(RIGHT)
    for key in draw.sample(["seed", "seq_len", "warmup_steps", "timed_steps"], 3):
        config["sweeps"]["one"][key] = list(range(1, draw.randrange(100, 5_000)))
    return _dump(config)


def _noise(draw: random.Random) -> bytes:
    """Send bytes that mean nothing."""
    return b"\xff" + draw.randbytes(draw.randrange(1, 10_000))


CONFIGS: list[Callable[[random.Random], bytes]] = [
    *[_with_value] * 8,
    *[_with_key, _with_line, _with_budget] * 3,
    *[_without, _too_many, _noise],
]


def make_config(draw: random.Random) -> bytes:
    """Make a config that must be refused."""
    return draw.choice(CONFIGS)(draw)


FIELDS = ["--model=tiny", "--method=standard", "--batch-size=1", "--seq-len=4"]
CAPACITY = ["--model=tiny", "--methods=standard", "--target=cpu", "--seq-len=4"]
BUDGET = [f"--{key}={value}" for key, value in RIGHT_BUDGET.items()]
SPECIAL = [
    "",
    "folder",
    "pipe",
    "device",
    "to-device",
    "to-nothing",
    "folder/../pipe",
    "file/x.json",
]
SPECIAL += ["file/x.json", "x" * 300, "\x1b[2J" * 100]
"""What is in the folder in which a command runs, and cannot be replaced by a file."""

DAMAGED = ["binary", "deep", "digits", "cut", "folder", "pipe", "nowhere", "device", ""]
"""What is there too, and cannot be read."""


def make_command(draw: random.Random) -> list[str]:
    """Make a command line that must be refused: a subcommand and its arguments."""
    return draw.choice(COMMANDS)(draw)


def _texts(key: str) -> list[str]:
    """List the values that a key cannot have, as text; null and a mapping of none is not given."""
    return [
        str(value)
        for value in BY_KEY[key]
        if isinstance(value, (str, int, float)) and value is not True
        if key != "trainable" or isinstance(value, str)  # as text, 1 is a regular expression
    ]


def _bad_field(draw: random.Random) -> list[str]:
    key = draw.choice([key for key in BY_KEY if key not in ("instruments", "replicates", "target")])
    value = f"--{key.replace('_', '-')}={draw.choice(_texts(key))}"
    script = draw.choice([["profile", *FIELDS, "--output=x.json"], ["estimate", *FIELDS]])
    return [*script, value]


def _bad_mapping(draw: random.Random) -> list[str]:
    mapping = [
        "{",
        "{a: 1, a: 2}",
        "{\x1b[2J: 1}",
        "{layers: [" * 10_000,
        "{a: *b}",
    ]
    mapping += [
        "{a: &a [*a]}",
        "{__use_yte__: true}",
        "{? [1] : 2}",
        "{}",
        "{a: !!python/none }",
        "{a: 010}",
    ]
    option = draw.choice(["--model", "--target"])
    return ["advise", *CAPACITY, f"{option}={draw.choice(mapping)}"]


def _bad_output(draw: random.Random) -> list[str]:
    script, arguments, option = draw.choice(
        [
            ("profile", FIELDS, "--output"),
            ("verify", ["--model=tiny", "--method=standard"], "--output"),
            ("ceilings", ["--device=cpu"], "--output"),
            ("advise", CAPACITY, "--json"),
            ("advise", CAPACITY, "--json"),
            ("budget", [*CAPACITY, *BUDGET], "--json"),
            ("figure", ["--figure=tradeoff", "--tables=folder"], "--output"),
            ("compare", ["folder", "folder"], "--output"),
            ("explain", ["cut", "binary"], "--output"),
            ("tables", ["--manifest=cut"], "--output-dir"),
            ("report", ["--tables=folder"], "--output-dir"),
        ]
    )
    return [script, *arguments, f"{option}={draw.choice(SPECIAL)}"]


def _bad_input(draw: random.Random) -> list[str]:
    damaged = draw.choice(DAMAGED)
    return draw.choice(
        [
            ["profile", f"--spec={damaged}", "--output=x.json"],
            ["tables", f"--manifest={damaged}", "--output-dir=t"],
            ["report", f"--tables={damaged}", "--output-dir=r"],
            ["figure", "--figure=tradeoff", f"--tables={damaged}", "--output=x.png"],
            ["prune", "--delete", damaged],
            ["compare", "folder", damaged],
            ["compare", "folder", "folder", f"--thresholds={damaged}"],
            ["explain", damaged, "cut"],
            ["explain", "cut", damaged, "--format=json"],
            ["watch", f"--results={damaged}"],
            ["watch", f"--results={damaged}/results"],
            ["verify", f"--stand-in={damaged}", "--method=standard", "--output=x.json"],
            ["ceilings", "--device=cpu", "--output=x.json", f"--operators-of={damaged}"],
            ["tables", "--manifest=cut", "--output-dir=t", "--ceilings", damaged],
        ]
    )


def _bad_option(draw: random.Random) -> list[str]:
    text = draw.choice([text for text in TEXTS if text.strip()])
    return draw.choice(
        [
            ["profile", *FIELDS, "--output=x.json", f"--{text}"],
            ["profile", *FIELDS, "--output=x.json", text],
            ["profile", *FIELDS, "--output=x.json", f"--replicate={text}"],
            ["profile", *FIELDS, "--output=x.json", f"--instrument={text}"],
            ["profile", *FIELDS],
            ["verify", f"--model={text}", "--method=standard", "--output=x.json"],
            ["verify", "--model=tiny", f"--method={text}", "--output=x.json"],
            ["ceilings", f"--device={text}", "--output=x.json"],
            ["figure", f"--figure={text}", "--tables=folder", "--output=x.png"],
            ["figure", "--figure=tradeoff", "--tables=folder", f"--output={text}.xyz"],
            ["advise", *CAPACITY, "--methods", "standard", text],
            ["advise", *CAPACITY, f"--target={text}"],
            ["budget", *CAPACITY, *BUDGET, f"--{draw.choice(list(RIGHT_BUDGET))}={text}"],
            ["forget", f"--outcome={text}"],
            ["compare", "folder", "folder", f"--metrics={text}"],
            ["compare", "folder", "folder", f"--across={text}"],
            ["compare", "folder", "folder", f"--format={text}"],
            ["compare", text, "folder"],
            ["explain", text, "cut"],
            ["explain", "cut", "binary", f"--depth={text}"],
            ["explain", "cut", "binary", f"--top={text}"],
            ["explain", "cut", "binary", f"--format={text}"],
            ["explain", "cut", "binary", f"--output={text}.xyz"],
            ["watch", f"--results={text}"],
            ["ceilings", "--device=cpu", "--output=x.json", f"--operators-s={text}"],
            ["estimate", *FIELDS, f"--target={text}"],
            [text, *FIELDS],
            [],
            ["forget"],
            ["prune", "--delete"],
        ]
    )


COMMANDS = [_bad_field, _bad_field, _bad_mapping, _bad_output, _bad_input, _bad_option]
