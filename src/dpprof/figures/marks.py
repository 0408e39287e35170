"""Which methods in a figure are not verified?"""

from collections.abc import Collection

from matplotlib.figure import Figure

from dpprof.analysis.verified import DAGGER
from dpprof.figures.style import PAGE_INCHES

_NOTE_INCHES = 0.25


def mark_unverified(figure: Figure, unverified: Collection[str]) -> list[str]:
    """Put a dagger behind the names of methods wherever a figure has them, and say what it means.

    Args:
        figure: As it was drawn; names are found in titles, legends and at ticks.
        unverified: Names of methods.

    Returns:
        The methods that were found.
    """
    legends = [*figure.legends, *(axis.get_legend() for axis in figure.axes)]
    texts = [axis.title for axis in figure.axes]
    texts += [text for legend in legends if legend is not None for text in legend.get_texts()]
    found = {text.get_text() for text in texts}.intersection(unverified)
    for text in texts:
        text.set_text(_mark(text.get_text(), unverified))
    for axis in figure.axes:
        for side in (axis.xaxis, axis.yaxis):
            labels = [label.get_text() for label in side.get_ticklabels()]
            if there := set(labels).intersection(unverified):
                found |= there
                # Ticks are labelled anew from this list whenever the figure is drawn.
                side.set_ticks(side.get_ticklocs(), [_mark(label, unverified) for label in labels])
    if found:
        above = [figure.get_suptitle(), f"{DAGGER} not verified to compute the right gradient"]
        figure.suptitle("\n".join(filter(None, above)), fontsize=8)
        figure.set_figheight(min(figure.get_figheight() + _NOTE_INCHES, PAGE_INCHES))
    return sorted(found)


def _mark(text: str, unverified: Collection[str]) -> str:
    return f"{text} {DAGGER}" if text in unverified else text
