"""A browser for the tests of pages."""

import pytest
from asked import asked, keep_capacities
from html_pages import find_chromium

__all__ = ["asked", "keep_capacities"]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright here")
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox does not run as root, as in CI.
        chromium = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        yield chromium
        chromium.close()
