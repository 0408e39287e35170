"""What several ranks exchange, and what privacy adds to it."""

import pandas as pd

from dpprof.report.sections.tables import ORDER, Told, amount, name_experiments, tabulate, texts

_MIB = 2**20


def tell_exchange(experiments: pd.DataFrame) -> Told:
    """Return what a rank sends in a step, by experiment; nothing where no ranks exchange any."""
    known = experiments[experiments["sent_bytes"].notna()].sort_values([*ORDER, "method"])
    if known.empty:
        return []
    naming = name_experiments(known)
    columns = naming | {
        "sent (MiB)": amount("sent_bytes", _MIB, 2),
        "beyond standard (MiB)": amount("sent_beyond_bytes", _MIB, 2),
    }
    caption = (
        "Bytes that a rank sends in a step, and receives as well, counted from the collectives "
        "that ran, each as a ring sends it; and how much of it standard, all else equal, does not."
    )
    return [tabulate(caption, columns, known, texts(naming), "results/tables/communication.csv")]
