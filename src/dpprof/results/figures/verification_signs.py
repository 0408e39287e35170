"""Signs in figures for methods that are not verified or use another mechanism."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from dpprof.results.analysis.standings import DAGGER, DOUBLE_DAGGER, Marks, sign
from dpprof.results.figures.style import PAGE_INCHES

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

    Names are found in titles, legends, tick labels, and beside points and lines.

    Returns:
        The methods that were marked, by sign.
    """
    marked = {name for methods in marks.values() for name in methods}
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes)]
    texts = [text for axis in figure.axes for text in (axis.title, *axis.texts)]
    texts += [text for legend in legends if legend is not None for text in legend.get_texts()]
    there = {text.get_text() for text in texts}.intersection(marked)
    for text in texts:
        text.set_text(_mark(text.get_text(), marks))
    for axis in figure.axes:
        for side in (axis.xaxis, axis.yaxis):
            labels = [label.get_text() for label in side.get_ticklabels()]
            if named := set(labels).intersection(marked):
                there |= named
                # Matplotlib reads tick labels from this list whenever it draws the figure.
                side.set_ticks(side.get_ticklocs(), [_mark(label, marks) for label in labels])
    shown = {mark: sorted(there.intersection(methods)) for mark, methods in marks.items()}
    shown = {mark: names for mark, names in shown.items() if names}
    if shown:
        above = [figure.get_suptitle(), *(_NOTES[mark] for mark in shown)]
        figure.suptitle("\n".join(filter(None, above)), fontsize=8)
        height = figure.get_figheight() + _NOTE_INCHES * len(shown)
        figure.set_figheight(min(height, PAGE_INCHES))
    return shown


def _mark(text: str, marks: Marks) -> str:
    signs = sign(text, marks)
    return f"{text} {signs}" if signs else text
