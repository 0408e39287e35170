"""Configs and command lines that nobody should accept: what is right, with one thing wrong.

What is wrong is drawn at random, and so is where.
"""

import copy
import itertools
import random
from collections.abc import Callable
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

TEXTS = ["", " ", "\x1b[2J\x1b]0;x\x07", "\u202egnp", "'; touch pwned; '", "$(touch pwned)"]
TEXTS += ["../../etc/passwd", "<script>", "{{ 7 }}", "%n%s", "\\input{x}", "a" * 100_000]
TEXTS += ["\N{SNAKE}"]
NO_NUMBER = [*TEXTS, "1,5", "4-8", "100%", "0x10", "1__0", "one", "--1", "inf", "nan", "-1", -1]
NO_NUMBER += [True, [[1]], {"a": 1}, float("nan"), float("inf"), -(10**400)]
NO_WHOLE = [*NO_NUMBER, 0, "0", 1.5, "1.5", "9" * 400, 10**400, "4GiB", None]
NO_COUNT = [*NO_WHOLE, 10**10, "1e3"]
NO_SIZE = [*NO_NUMBER, 0, 4.5, "4,000MiB", "79,1GiB", "4-8GiB", "4GiB; rm -rf /", "4 lots"]
NO_SIZE += ["9" * 400]
NO_NAME = [*TEXTS, "Tiny", "opacus_ghost", "Standard", "nobody", 1, 1.5, True, None, [["x"]], -1]
UNEVEN = {"vocab_size": 9, "d_model": 8, "layers": 1, "heads": 3}
EVIL = {"hf": "tiny-llama", "auto_map": {"AutoModel": "evil.Evil"}}
NO_HF = [*(f"hf:{text}" for text in TEXTS), "hf:llama-3.1-9b", "hf:nothing.json", {"hf": 1}, EVIL]
BY_KEY: dict[str, list[Any]] = {
    "model": [*NO_NAME, {}, {"layers": 1}, UNEVEN, *NO_HF],
    "lora": [*NO_NUMBER, *TEXTS, {}, {"rank": 0}, {"rank": 1, "alpha": 0}, {"rank": [1]}, 4],
    "trainable": ["((", "lora", "", 1, True, {}, [["x"]]],
    "padding": [*NO_NUMBER, {}, 1, {"fraction": "\x1b[2J"}],
    "quantization": [*(name for name in NO_NAME if name is not None), "nf4", "gptq", {}],
    **{key: [*NO_NAME, "bfloat16", "half", {}] for key in ("parameters_dtype", "trained_dtype")},
    "autocast": [2, "maybe", None, [True], {}],
    **{key: [2, "maybe", [True], {}] for key in ("keep_logits", "use_cache")},
    "checkpointed_share": [*NO_NUMBER, 0, 1.1, None],
    "loop": [*NO_NAME, "hf", {}],
    **{
        key: [*(name for name in NO_NAME if name is not None), {}] for key in ("loss", "loss_dtype")
    },
    "loss_scale": [*NO_NUMBER, 0, 3, 2**40, None],
    "busy_gpu": [*NO_NAME, "wait", True, {}],
    **{key: [*NO_NAME, {}] for key in ("method", "optimizer", "attention", "checkpointing")},
    **dict.fromkeys(("batch_size", "seq_len", "warmup_steps", "timed_steps"), NO_COUNT),
    "seed": [*NO_NUMBER, 2**32, 1.5, None],
    "dtype": [*NO_NAME, "half", {}],
    "device": [*NO_NAME, "tpu", {}],
    **{key: [*NO_NUMBER, 0, None] for key in ("max_grad_norm", "learning_rate")},
    "noise_multiplier": [*NO_NUMBER, None],
    "timeout_s": [*NO_NUMBER, 0, "15 min", None],
    "memory_limit_bytes": NO_SIZE,
    "instruments": [*NO_NAME, {}],
    "replicates": [*NO_COUNT, 1001, [1]],
    "target": [
        *(name for name in NO_NAME if name is not None),
        *({}, {"memory_bytes": "1GiB"}, {"memory_bytes": 1, "\x1b[2J": 1}),
    ],
}
"""Wrong values by key of an experiment."""

PRIVACY: dict[str, list[Any]] = {
    **dict.fromkeys(("samples", "tokens", "least_steps"), NO_WHOLE),
    "epsilon": [*NO_NUMBER, 0, "0", [], [8, 0], None],
    "delta": [*NO_NUMBER, 0, 1, "1"],
    "batch_size": [*(one for one in NO_WHOLE if one is not None), 10_001],
    "accountant": [*NO_NAME, "gdp"],
    "price_per_hour": NO_NUMBER,
}
"""Wrong values by key of a privacy budget."""

RIGHT_BUDGET = {"samples": 10_000, "tokens": "4e6", "epsilon": 8, "delta": 1e-5}
RIGHT: dict[str, Any] = {
    "defaults": {"model": "tiny", "seq_len": 8, "device": "cpu"},
    "sweeps": {
        "one": {"method": ["standard", "flash"], "batch_size": [1, 2], "instruments": "clean"},
        "two": {"method": "standard", "batch_size": 4, "memory_limit_bytes": "4GiB"},
    },
    "exclude": [{"method": "flash", "batch_size": 2}],
}
DEFAULTS, ONE, TWO, EXCLUDE = ("defaults",), ("sweeps", "one"), ("sweeps", "two"), ("exclude", 0)
GONE = object()
"""The value of a key that is left out."""

Edits = dict[tuple[Any, ...], Any]
"""Values by their path in a config."""


def _give_value(draw: random.Random) -> Edits:
    """Give one key a value that it cannot have."""
    key = draw.choice(list(BY_KEY))
    value = draw.choice(BY_KEY[key])
    places: list[tuple[Any, ...]] = [DEFAULTS, ONE, TWO]
    # An exclude names what to leave out, so what is wrong with an experiment need not be there.
    if key not in ("instruments", "replicates") and value not in ("lora", "bfloat16"):
        places.append(EXCLUDE)
    listed = key != "replicates" and not isinstance(value, list) and draw.random() < 0.3
    return {(*draw.choice(places), key): [value] * draw.choice([1, 1, 50]) if listed else value}


def _give_budget(draw: random.Random) -> Edits:
    """Give a privacy budget a value that it cannot have."""
    key = draw.choice(list(PRIVACY))
    budget = RIGHT_BUDGET | {key: draw.choice(PRIVACY[key])}
    return {(*TWO, "instruments"): "capacity", (*TWO, "target"): "h200", ("privacy",): budget}


def _add_key(draw: random.Random) -> Edits:
    """Use a key that does not exist."""
    key = draw.choice([*TEXTS, "bath_size", "METHOD", 1, None, True, 1.5])
    place = draw.choice([(), DEFAULTS, ONE, EXCLUDE])
    return {(*place, key): draw.choice([1, None, {}, "x"])}


def _leave_out(draw: random.Random) -> Edits:
    """Leave out what is required, or put something else in its place."""
    required = [(*DEFAULTS, "model"), (*DEFAULTS, "seq_len"), (*TWO, "method")]
    required += [(*TWO, "batch_size")]
    path = draw.choice([*required, DEFAULTS, ("sweeps",), TWO])
    wrong = [None, 1, "x", [], [1], True, *([{}] if path != TWO else [])]
    return {path: GONE if path in required else draw.choice(wrong)}


def _ask_for_too_much(draw: random.Random) -> Edits:
    """Ask for far more runs than there may be."""
    keys = draw.sample(["seed", "seq_len", "warmup_steps", "timed_steps"], 3)
    return {(*ONE, key): list(range(1, draw.randrange(100, 5_000))) for key in keys}


def _bomb(shape: bytes) -> bytes:
    """Stand for billions of values in few lines."""
    first = b"xa: &a " + (b"{k: 1}" if b"<<" in shape else b"[1]")
    names = [b"%c" % letter for letter in b"abcdefghijk"]
    pairs = itertools.pairwise(names)
    return b"\n".join(
        [first, *(b"x%s: &%s " % (n, n) + shape % b", ".join([b"*" + m] * 9) for m, n in pairs)]
    )


LINES = [b"sweeps: {}", b"defaults: {model: tiny}", b"__use_yte__: true"]
LINES += [b"<<: {__use_yte__: 1}", b"x: !!python/object/apply:os.system [touch pwned]"]
LINES += [b"x: \xff\xfe", b"x: [1", b"x: \x00", b"x: 010", b"x: 4:00", b"%YAML 9.9", b"x: @"]
LINES += [b"x: " + bracket * 100_000 for bracket in (b"[", b"{", b"- ")]
LINES += [b"x: " + b"9" * 10_000, b"x: 2024-99-99", b"x: &a [*a]", b"x: *nowhere", b"\tx: 1"]
LINES += [b"x: [" + b"1, " * count + b"]" for count in (150_000, 1_000_000)]
LINES += [b"? [1]\n: 2", b"--- 1", _bomb(b"[%s]"), _bomb(b"{<<: [%s]}")]
"""Lines that cannot be read, are read twice, or that Snakemake would execute."""

EDITS: list[Callable[[random.Random], Edits]] = [
    *[_give_value] * 8,
    *[_give_budget, _add_key] * 3,
    *[_leave_out, _ask_for_too_much],
]


def make_config(draw: random.Random) -> bytes:
    """Make a config that must be refused."""
    how = draw.randrange(20)
    if how == 0:
        return b"\xff" + draw.randbytes(draw.randrange(1, 10_000))
    config = copy.deepcopy(RIGHT)
    for (*places, key), value in draw.choice(EDITS)(draw).items() if how > 3 else ():
        place = reduce(getitem, places, config)
        place[key] = value
        if value is GONE:
            del place[key]
    lines = yaml.dump(config, allow_unicode=False, sort_keys=False).encode().splitlines()
    if how <= 3:
        lines.insert(draw.choice([0, len(lines)]), draw.choice(LINES))
    return b"\n".join(lines)


def _list_options(values: dict[str, list[Any]]) -> list[str]:
    """List options with the values that they cannot have, as text."""
    return [
        f"--{key.replace('_', '-')}={value}"
        for key in values
        for value in values[key]
        # Null and a mapping of none is not given; as text, 1 is a regular expression.
        if isinstance(value, str if key == "trainable" else str | int | float) and value is not True
    ]


NO_OPTIONS = ("instruments", "replicates", "target")
HOLES: dict[str, list[str]] = {
    "FIELD": _list_options({key: BY_KEY[key] for key in BY_KEY if key not in NO_OPTIONS}),
    "MAPPING": [
        *("{", "{a: 1, a: 2}", "{\x1b[2J: 1}", "{layers: [" * 10_000, "{a: *b}", "{a: &a [*a]}"),
        *("{__use_yte__: true}", "{? [1] : 2}", "{}", "{a: !!python/none }", "{a: 010}"),
    ],
    "TEXT": [text for text in TEXTS if text.strip()],
    # What is in the folder in which a command runs, and cannot be replaced by a file.
    "OUTPUT": [
        *("", "folder", "pipe", "device", "to-device", "to-nothing", "folder/../pipe"),
        *("file/x.json", "x" * 300, "\x1b[2J" * 100),
    ],
    # What is there too, and cannot be read.
    "INPUT": ["binary", "deep", "digits", "cut", "folder", "pipe", "nowhere", "device", ""],
}
"""What stands in command lines for what is wrong, with what is drawn for it."""

ONCE = "--model=tiny --method=standard --batch-size=1 --seq-len=4"
PROFILE = f"profile {ONCE} --output=x.json"
ADVISE = "advise --model=tiny --methods=standard --target=cpu --seq-len=4"
BUDGET = ADVISE.replace("advise", "budget") + "".join(
    f" --{k}={v}" for k, v in RIGHT_BUDGET.items()
)
_LINES = Path(__file__).with_name("commands.txt").read_text(encoding="utf-8")
_LINES = _LINES.format(ONCE=ONCE, PROFILE=PROFILE, ADVISE=ADVISE, BUDGET=BUDGET)
COMMANDS = [*_LINES.splitlines(), ""]
"""Command lines that must be refused, one without even a command."""


def make_command(draw: random.Random) -> list[str]:
    """Make a command line that must be refused: a subcommand and its arguments."""
    hole = draw.choice(["FIELD", *HOLES, ""])
    fitting = [
        line for line in COMMANDS if hole in line and (hole or not any(map(line.count, HOLES)))
    ]
    value = draw.choice(HOLES[hole]) if hole else ""
    return [part.replace(hole, value) for part in draw.choice(fitting).split()]
