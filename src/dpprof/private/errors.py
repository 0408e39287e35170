"""What the library raises where nothing in the standard library says it."""


class UnsupportedError(Exception):
    """A combination of valid values that cannot run, here or anywhere; the message says why."""


class BatchAxisError(UnsupportedError, ValueError):
    """The first axis of a layer's input is not the batch."""

    @classmethod
    def of(cls, name: str, samples: int, losses: int, why: str = "") -> "BatchAxisError":
        """Return the error of a layer or parameter that saw another number of samples."""
        return cls(
            f"{name} saw {samples} samples, and there are {losses} losses; the first axis of every "
            "layer's input must be the batch, or the second where batch_second says so, or hold "
            f"rows of each sample, which the graph must show{why and f' ({why})'}; name a module "
            "around it that gets and returns samples in as_one=[...], or freeze it"
        )
