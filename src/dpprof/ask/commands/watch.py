"""Write the report of the results so far, again and again while the sweep runs.

The page is results/live.html. Open it in a browser: it renews itself, and says what has ended,
fails, runs and remains.
"""

import os
from collections.abc import Sequence

from dpprof.ask.commands.common import Parser, ending_in_a_sentence, path
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.launch.isolated import ended_by_signals
from dpprof.experiments.planning.artifacts import RESULTS
from dpprof.results.report.page.live import LIVE_PAGE, LivePage
from dpprof.system.console import keep_log


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser("watch", __doc__)
    parser.add_argument(
        "--results",
        type=path,
        default=RESULTS,
        help="the folder results of the sweep (default: results)",
    )
    arguments = parser.parse_args(argv)
    keep_log(None)
    with ending_in_a_sentence("the page is not renewed any more; a sweep goes on"):
        results = arguments.results.absolute()  # links are not followed, as results may be one
        if results.name != RESULTS.name:
            why = f"it must be a folder named {RESULTS}"
            raise InputError(f"--results: {arguments.results} is not allowed; {why}")
        page = LivePage(results.parent)
        os.nice(19)
        print(f"{arguments.results / LIVE_PAGE.name} shows the sweep; Ctrl-C ends it", flush=True)
        with ended_by_signals():  # its last page must not say that it is renewed
            page.follow()
