"""Times of operators, measured on a device at the shapes of training steps."""

from pydantic import Field

from dpprof.experiments.records.record import Part


class OperatorShape(Part):
    """What the time of an operator depends on."""

    op: str = Field(description="its name, such as addmm")
    call: str = Field(description="digest of its overload, and of the layouts of its arguments")
    layout: str = Field(
        description="its overload, and how its arguments lie in memory, whatever their sizes"
    )
    family: str = Field(description="what kind of work it does")
    dtype: str = Field(description="of its first tensor")
    flops: int
    read_bytes: int = Field(description="what it reads, each once; of a table what it looks up")
    written_bytes: int
    row: int = Field(description="elements of the last axis of its largest tensor")
    product: tuple[int, int, int, int] | None = Field(
        description="batch, m, n and k of a matrix product"
    )


class OperatorTime(OperatorShape):
    """The time of one operator at one set of arguments."""

    seconds: float = Field(description="the median of the rounds, with calling it from Python")
    spread: float = Field(
        description="standard deviation of the logarithm of rounds, beyond the drift of all"
    )


class OperatorTable(Part):
    """Operators of training steps that were timed one by one."""

    operators: list[OperatorTime]
    threads: int = Field(description="that computed")
    rounds: int = Field(description="how many times each was timed, one after all others")
    drift: float | None = Field(
        description="standard deviation of the logarithm of the machine's speed between rounds; "
        "null after one"
    )
    host_s: float = Field(
        description="what a step takes besides its operators, for each: Python, hooks, autograd"
    )
    host_spread: float = Field(description="standard deviation of its logarithm")
    step_factor: float = Field(
        description="how many times as long operators take in a step as alone, by one step of small"
    )
    experiments: list[str] = Field(description="ids of the experiments whose operators these are")
    left_out: dict[str, str] = Field(
        description="experiments and operators that were not timed, and why"
    )
    wall_s: float
