"""The style of every figure: colour-blind safe, with a fixed colour and signs for each method."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from dpprof.results.analysis.standings import DAGGER, DOUBLE_DAGGER, Marks, sign
from dpprof.results.analysis.tables.axes import BASELINE

COLUMN_INCHES = 3.4  # width of one column of a two-column paper; text is legible at this size
_TICKS = 6  # the most parts of a linear axis
_LETTER_POINTS = 4.5  # width of a letter of a tick's label; labels have 8 points
_GAP_POINTS = 8  # the least between two labels
PAGE_INCHES = 9.0  # a figure higher than this leaves no room for its caption on a page
BYTE_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}  # units, the largest first

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
    "flash": ("#661100", "<"),
    "flash-bk": (_PALETTE[2], ">"),
    "per-layer": ("#999933", "h"),
    "opacus-per-layer": ("#882255", "H"),
    "opacus-adaptive": ("#332288", "d"),
}
_OTHER_MARKERS = ("p", "*", "8")
SERIES_COLOURS = _PALETTE  # colours of series that are no methods, in order
COMPONENT_COLOURS: dict[str, str] = {
    "parameters": _PALETTE[0],
    "quantization_scales": "#0F0FB4",
    "dequantized_weights": "#87E1FF",
    "gradients": _PALETTE[4],
    "optimizer_state": "#332288",
    "saved_activations": _PALETTE[2],
    "dp_activations": "#B2DF8A",
    "output_gradients": "#00441B",
    "per_sample_gradients": _PALETTE[5],
    "norm_samples": _PALETTE[6],
    "gram_matrices": "#882255",
    "summed_gradients": _PALETTE[1],
    "noise": _PALETTE[3],
    "unsharded_parameters": "#0000EE",
    "unsharded_gradients": "#000033",
    "communication_buffers": "#BB44FF",
    "inputs": _BLACK,
    "logits_and_loss": "#FAC9B8",
    "workspace": "#8B5A2B",
    "unattributed": "#F2F2F2",
}
"""Colours of components, in stacking order.

Blue components exist in any training, green ones are activations, red to yellow ones exist per
sample, and the darkest blue ones and violet with several ranks. A test checks that deuteranopes and
protanopes can distinguish them.
"""

HATCHES = {"unattributed": "//////", "other": "//////", "idle": "......", "unknown": "//////"}
"""Hatches, besides colours, of the parts that have no known owner or kind."""

PHASE_COLOURS: dict[str, str] = {
    "forward": _PALETTE[4],
    "backward": _PALETTE[0],
    "second_backward": _PALETTE[3],
    "clip": _PALETTE[1],
    "noise": _PALETTE[2],
    "step": "#999999",
}
PHASE_MARKERS: dict[str, str] = {
    "setup": "*",
    "forward": ">",
    "backward": "o",
    "second_backward": "s",
    "clip": "D",
    "noise": "v",
    "step": "P",
}
OP_KIND_COLOURS: dict[str, str] = {
    "gemm": _PALETTE[0],
    "attention": _PALETTE[4],
    "einsum": _PALETTE[5],
    "norm": "#882255",
    "clip": _PALETTE[1],
    "random": _PALETTE[3],
    "optimizer": _BLACK,
    "elementwise": _PALETTE[2],
    "reduce": "#B2DF8A",
    "indexing": "#332288",
    "copy": _PALETTE[6],
    "communication": "#8B5A2B",
    "other": "#F2F2F2",
    "idle": "#FFFFFF",
}
"""Colours of op kinds, in stacking order; idle is not an op kind."""

OUTCOME_COLOURS: dict[str, str] = {
    "ok": _PALETTE[2],
    "oom": _PALETTE[5],
    "unsupported": "#BBBBBB",
    "timeout": _PALETTE[1],
    "killed": _PALETTE[3],
    "crashed": _BLACK,
}


class SparseTicks(MaxNLocator):
    """Ticks of a horizontal axis, as many as have room for their labels."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self._most = most

    def tick_values(self, vmin: float, vmax: float) -> Any:
        """Return where ticks are."""
        axes: Any = getattr(self.axis, "axes")  # noqa: B009 (its stubs have axes without figures)
        points = 72 * axes.get_window_extent().width / axes.figure.dpi
        places: Any = []
        for parts in range(self._most, 0, -1):
            self.set_params(nbins=parts)
            places = super().tick_values(vmin, vmax)
            letters = max(len(spell_tick(place)) for place in places)
            if (len(places) - 1) * (letters * _LETTER_POINTS + _GAP_POINTS) <= points:
                break
        return places


class NothingToDrawError(Exception):
    """The tables hold nothing that a figure could show; the message names what is missing."""


_SETTINGS: dict[Any, Any] = {
    "figure.dpi": 200,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 7,
    "legend.handlelength": 1.5,
    "legend.columnspacing": 1.2,
    "hatch.linewidth": 0.4,
    "pdf.fonttype": 42,
    # Names come from configs: a "$" in a name is a dollar sign, not mathematics.
    "text.parse_math": False,
}


def choose_byte_unit(highest: float) -> str:
    """Return the unit of an axis whose highest value is this many bytes.

    Example:
        >>> choose_byte_unit(3 * 2**30)
        'MiB'
    """
    return next(name for name, size in BYTE_UNITS.items() if highest >= 4 * size or size == 1)


def method_style(method: str) -> dict[str, Any]:
    """Return a method's colour and marker as line properties, the same in every figure.

    For a method from another package both follow from a digest of its name.
    """
    if method in _METHODS:
        colour, marker = _METHODS[method]
    else:
        digest = hashlib.sha256(method.encode()).digest()
        colour = _PALETTE[digest[0] % len(_PALETTE)]
        marker = _OTHER_MARKERS[digest[1] % len(_OTHER_MARKERS)]
    # A thin edge keeps the light colours visible on white.
    return {"color": colour, "marker": marker, "markeredgecolor": "#333333", "markeredgewidth": 0.4}


def sort_methods(names: Iterable[str]) -> list[str]:
    """Return methods in the order of every figure: the baseline first, then by name."""
    return sorted(set(names), key=lambda name: (name != BASELINE, name))


def new_figure(
    columns: int = 1,
    rows: int = 1,
    *,
    row_inches: float = 2.5,
    width_inches: float | None = None,
    **options: Any,
) -> tuple[Figure, Any]:
    """Return a figure of panels, one or two columns of a paper wide.

    ``row_inches`` is reduced where the figure would be too high for a page. ``width_inches``
    replaces the width that follows from the columns. ``options`` are those of
    ``Figure.subplots``.

    Returns:
        The figure, and its axes as a (rows, columns) array.
    """
    mpl.rcParams.update(_SETTINGS)
    row_inches = min(row_inches, PAGE_INCHES / rows)
    width = width_inches or COLUMN_INCHES * min(columns, 2)  # a page is two columns wide
    figure = Figure(figsize=(width, row_inches * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for axis in axes.flat:
        axis.xaxis.set_major_locator(SparseTicks(_TICKS if columns == 1 else _TICKS - 2))
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_formatter(spell_tick)
    return figure, axes


def scale_log(axis: Axes, ticks: Sequence[float], label: str, base: int = 2) -> None:
    """Make the horizontal axis logarithmic, with these ticks, and begin the vertical one at 0."""
    axis.set_xscale("log", base=base)
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter(FuncFormatter(spell_tick))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel(label)
    axis.set_ylim(bottom=0)
    axis.margins(x=0.1)


def spell_tick(value: float, _position: int | None = None) -> str:
    """Return the label of a tick: thousands are separated, and no digits stand for zeros."""
    return f"{value:,.10g}"


def tell(figure: Figure, sentence: str) -> None:
    """Keep the sentence that stands above a figure in the report: what is seen in it."""
    figure.set_label(sentence)


def say_nothing_to_draw(reason: str) -> Figure:
    """Return a figure that shows why it is empty, without axes."""
    figure, axes = new_figure()
    axes[0, 0].axis("off")
    axes[0, 0].text(0.5, 0.5, reason, ha="center", va="center", wrap=True)
    return figure


_NOTE_INCHES = 0.25
_NOTES: Mapping[str, str] = {
    DAGGER: f"{DAGGER} not verified to compute the right gradient",
    DOUBLE_DAGGER: f"{DOUBLE_DAGGER} another mechanism than flat clipping",
}

MEANINGS: Mapping[str, str] = {
    DAGGER: "Not verified",
    DOUBLE_DAGGER: "Another mechanism than flat clipping",
}
"""The meaning of each sign, as in captions."""


def mark_methods(figure: Figure, marks: Marks) -> dict[str, list[str]]:
    """Append signs to the names of methods in a figure, and explain the signs in its title.

    Names are in titles, legends, tick labels, and beside points and lines. Return the methods that
    were marked, by sign.
    """
    names = {name for methods in marks.values() for name in methods}
    marked = {name: f"{name} {sign(name, marks)}" for name in names}
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes)]
    texts = [text for axis in figure.axes for text in (axis.title, *axis.texts)]
    texts += [text for legend in legends if legend is not None for text in legend.get_texts()]
    there = {text.get_text() for text in texts} & names
    for text in texts:
        text.set_text(marked.get(text.get_text(), text.get_text()))
    for axis in figure.axes:
        for side in (axis.xaxis, axis.yaxis):
            labels = [label.get_text() for label in side.get_ticklabels()]
            if not names.isdisjoint(labels):
                there |= names.intersection(labels)
                # Matplotlib reads tick labels from this list whenever it draws the figure.
                side.set_ticks(side.get_ticklocs(), [marked.get(text, text) for text in labels])
    shown = {mark: sorted(there.intersection(methods)) for mark, methods in marks.items()}
    shown = {mark: methods for mark, methods in shown.items() if methods}
    if shown:
        above = [figure.get_suptitle(), *(_NOTES[mark] for mark in shown)]
        figure.suptitle("\n".join(filter(None, above)), fontsize=8)
        height = figure.get_figheight() + _NOTE_INCHES * len(shown)
        figure.set_figheight(min(height, PAGE_INCHES))
    return shown
