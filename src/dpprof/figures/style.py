"""One look for every figure: colour-blind safe, a method always in the same colour."""

import hashlib
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

COLUMN_INCHES = 3.4
"""Width of one column of a two-column paper; text stays legible at this size."""

# Okabe and Ito 2008, "Color Universal Design".
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_BLACK = "#000000"
_METHODS: dict[str, tuple[str, str]] = {
    "standard": (_BLACK, "s"),
    "microbatch": (_PALETTE[3], "v"),
    "opacus-hooks": (_PALETTE[1], "o"),
    "opacus-functorch": (_PALETTE[5], "^"),
    "opacus-ew": (_PALETTE[6], "P"),
    "opacus-ghost": (_PALETTE[0], "D"),
    "opacus-fast-gradient-clipping": (_PALETTE[4], "X"),
}
_OTHER_MARKERS = ("<", ">", "h", "p", "*")


_SETTINGS: dict[Any, Any] = {
    "figure.dpi": 200,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "legend.handlelength": 1.5,
    "legend.columnspacing": 1.2,
    "pdf.fonttype": 42,
    # Names come from configs: a "$" in one is a dollar sign, not mathematics.
    "text.parse_math": False,
}


def method_style(method: str) -> dict[str, Any]:
    """Give a method its colour and marker as line properties, the same in every figure.

    A method from another package gets both from a digest of its name.
    """
    if method in _METHODS:
        colour, marker = _METHODS[method]
    else:
        digest = hashlib.sha256(method.encode()).digest()
        colour = _PALETTE[digest[0] % len(_PALETTE)]
        marker = _OTHER_MARKERS[digest[1] % len(_OTHER_MARKERS)]
    # A thin edge keeps the light colours visible on white.
    return {
        "color": colour,
        "marker": marker,
        "markeredgecolor": "#333333",
        "markeredgewidth": 0.4,
    }


def new_figure(columns: int = 1, rows: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Make a figure of panels, each as wide as a paper's column.

    Returns:
        The figure, and its axes as a (rows, columns) array.
    """
    mpl.rcParams.update(_SETTINGS)
    figure = Figure(figsize=(COLUMN_INCHES * columns, 2.5 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, axes


def say_nothing_to_draw(reason: str) -> Figure:
    """Make a figure that says why it is empty, instead of empty axes."""
    figure, axes = new_figure()
    axes[0, 0].axis("off")
    axes[0, 0].text(0.5, 0.5, reason, ha="center", va="center", wrap=True)
    return figure
