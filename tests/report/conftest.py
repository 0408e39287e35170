"""A browser for the tests of pages."""

import pytest
from asked import keep_capacities
from browsing import Opened
from html_pages import find_chromium

__all__ = ["keep_capacities"]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here")
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox does not run as root, as in CI.
        chromium = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """Opens a page in the browser until the test ends."""
    pages = []

    def open_page(file, **options) -> Opened:
        pages.append(Opened(browser, file, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.context.close()
