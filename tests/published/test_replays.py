"""Snapshots of GPUs, played through the simulated allocator."""

import pytest
from published import page
from published.replays import REPLAYS, Replay

each_replay = pytest.mark.parametrize("replay", REPLAYS, ids=lambda replay: replay.label)


@each_replay
def test_rounded_sizes_give_the_peak_exactly(replay: Replay) -> None:
    assert replay.peak_of_rounded() == replay.peak


@each_replay
def test_what_was_there_before_is_known_but_for_the_inputs(replay: Replay) -> None:
    assert replay.unexplained_bytes() < 2**20


@each_replay
def test_places_depend_on_what_was_there_before_by_little(replay: Replay) -> None:
    """In which order that was allocated is not known; so neither number can be exact."""
    played = replay.play()
    assert played.allocated == pytest.approx(replay.published.allocated, rel=0.001)
    assert played.reserved == pytest.approx(replay.published.reserved, rel=0.007)


def test_the_page_shows_what_is_simulated() -> None:
    text = page.PAGE.read_text()
    assert [row for row in map(page.row_of_replay, REPLAYS) if row not in text] == []
