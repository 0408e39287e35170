"""Times of operators, measured on a device at the shapes of training steps."""

from pydantic import Field

from dpprof.records.record import Part


class OperatorTime(Part):
    """The time of one operator at one set of arguments."""

    op: str = Field(description="its name, such as addmm")
    call: str = Field(description="digest of its overload, and of the layouts of its arguments")
    family: str = Field(description="what kind of work it does")
    dtype: str = Field(description="of its first tensor")
    flops: int
    moved_bytes: int = Field(description="what it reads and writes, each once")
    product: tuple[int, int, int, int] | None = Field(
        description="batch, m, n and k of a matrix product"
    )
    seconds: float = Field(description="the median of its repeats")
    spread: float = Field(description="standard deviation of the logarithm of its repeats")


class OperatorTable(Part):
    """Operators of training steps that were timed one by one."""

    operators: list[OperatorTime]
    host_s: float = Field(
        description="what a step takes besides its operators, for each: Python, hooks, autograd"
    )
    host_spread: float = Field(description="standard deviation of its logarithm")
    experiments: list[str] = Field(description="ids of the experiments whose operators these are")
    left_out: dict[str, str] = Field(
        description="experiments and operators that were not timed, and why"
    )
    wall_s: float
