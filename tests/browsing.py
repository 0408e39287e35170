"""A page in a real browser, with what it logs, asks for and saves."""

import csv

_COMPARE = """(pairs) => pairs.map((pair) => {
    for (const [side, number] of pair.entries()) {
        const select = document.querySelectorAll("#compare select")[side];
        select.value = String(number);
        select.dispatchEvent(new Event("change"));
    }
    return document.querySelector("#compare .sum").textContent;
})"""

SIZE = {"width": 1280, "height": 900}


class Opened:
    """A page, with what it logged and what it asked the network for."""

    def __init__(self, browser, file, *, clock: bool = False, **options) -> None:
        """``clock``: whether the test may move the page's clock forward."""
        self.context = browser.new_context(offline=True, viewport=SIZE, **options)
        self.context.set_default_timeout(180_000)  # a machine may be busy with other tests
        self.page = self.context.new_page()
        if clock:
            self.page.clock.install()
        self.told, self.asked = [], []
        self.page.on("console", lambda message: self.told.append(message.text))
        self.page.on("pageerror", lambda error: self.told.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("dialog", lambda dialog: self.told.append(f"dialog {dialog.message}"))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]")
        self.settle()

    def settle(self) -> None:
        """Have every chart drawn, as for printing, and wait for it."""
        self.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        self.page.wait_for_selector("figure.chart:not([data-drawn=yes])", state="detached")

    def choose(self, view, label, text) -> None:
        self.page.locator(f"#{view}").get_by_label(label, exact=True).select_option(text)

    def subtract(self, pairs) -> list[str]:
        """Compare pairs of steps, given by their numbers; returns what the page says of each."""
        return self.page.evaluate(_COMPARE, pairs)

    def save(self, name) -> list[dict[str, str]]:
        """Press the button that saves a view's data; returns the rows of the file."""
        with self.page.expect_download() as saved:
            self.page.locator(f"[data-csv={name}]").first.click()
        assert saved.value.suggested_filename == f"{name}.csv"
        with open(saved.value.path(), newline="", encoding="utf-8") as file:  # noqa: PTH123
            return list(csv.DictReader(file))

    def hint_at(self, locator) -> str:
        locator.scroll_into_view_if_needed()
        self.page.mouse.move(0, 0)
        box = locator.bounding_box()
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
        self.page.wait_for_selector("#hint:not([hidden])")
        return self.page.locator("#hint").inner_text()
