"""The live page in a real browser, while results arrive."""

import pytest
from factory import make_experiment
from html_pages import record
from live_sweeps import Sweep, serving

from dpprof.report.live.builder import Builder

HOSTILE = "</script><script>pwned=1</script><img src=x onerror=pwned=1> {{7*7}} a\u202eb"
SHOWN = HOSTILE.replace("\u202e", "⟨U+202E⟩")


READING = "setInterval(() => window.dispatchEvent(new Event('keydown')), 500)"
"""A reader who is always at it."""

AWAY = "Object.defineProperty(document, 'hidden', { value: true })"
"""A reader who looks at another tab."""


class LivePage:
    """A live page of a browser that reaches the server alone, and what it logged."""

    def __init__(self, browser, url: str, reader: str) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900})
        self.asked, self.told = set(), []
        self.context.route("**", lambda route: self._follow(route, url))
        self.context.add_init_script(reader)
        self.page = self.context.new_page()
        self.page.set_default_timeout(90_000)
        self.page.on("console", lambda message: self.told.append(message.text))
        self.page.on("pageerror", lambda error: self.told.append(str(error)))
        self.page.goto(url)

    def _follow(self, route, url: str) -> None:
        self.asked.add(route.request.url.removeprefix(url))
        if route.request.url.startswith(url):
            route.continue_()
        else:
            route.abort()

    def wait_for(self, text: str, where: str = "#live") -> None:
        self.page.locator(where).get_by_text(text).first.wait_for()

    def wait_until_ready(self) -> None:
        self.page.wait_for_selector("html[data-ready=yes]")


def plan_recorded(root) -> Sweep:
    """Plan runs under memory, of which the views of the page need two."""
    methods = ("standard", "flash-bk", "opacus-hooks", "opacus-ghost")
    return Sweep(root, *((make_experiment(method=method), "memory", 0) for method in methods))


@pytest.fixture
def live(browser, tmp_path, request):
    sweep = plan_recorded(tmp_path)
    with serving(tmp_path, Builder(tmp_path, pause_s=0.0, share=float("inf"))) as server:
        one = LivePage(browser, server.url, request.param)
        one.sweep, one.server = sweep, server
        yield one
        one.context.close()


@pytest.mark.parametrize("live", [READING], indirect=True, ids=["reading"])
def test_the_strip_and_the_page_follow_the_sweep_and_the_reader_keeps_the_place(live) -> None:
    page, sweep = live.page, live.sweep
    live.wait_for("0 of 4 runs done, 0 failed, 0 running, 4 remaining")
    live.wait_until_ready()  # the empty page renews itself once there is a report

    sweep.begin(0)
    live.wait_for("0 of 4 runs done, 0 failed, 1 running, 3 remaining")
    live.wait_for(f"{sweep.name(0)}: ")
    live.wait_for("expected time unknown: no run under memory has ended")
    for at in range(3):
        sweep.end(at, 60.0, recorded=record(at))
    live.wait_for("3 of 4 runs done")
    page.locator("#news button").click()
    live.wait_until_ready()
    assert page.locator("#experiments tbody tr").count() == 3

    # The reader chooses a run, scrolls, and reads on while a failure comes in.
    names = page.get_by_label("A", exact=True).locator("option").all_inner_texts()
    page.get_by_label("A", exact=True).select_option(names[-1])
    page.locator("#compare").evaluate("(one) => window.scrollTo(0, one.offsetTop + 30)")
    top = page.locator("#compare").evaluate("(one) => one.getBoundingClientRect().top")
    sweep.end(3, 60.0, outcome="crashed", message=HOSTILE)
    live.wait_for("3 of 4 runs done, 1 failed, 0 running, 0 remaining")
    live.wait_for("1 new result: ", "#news")
    page.locator("#news button").click()
    page.locator("#outcomes").get_by_text("SyntheticError").first.wait_for(state="attached")
    live.wait_until_ready()

    assert (
        page.get_by_label("A", exact=True).evaluate("(one) => one.selectedOptions[0].text")
        == (names[-1])
    )
    now = page.locator("#compare").evaluate("(one) => one.getBoundingClientRect().top")
    assert now == pytest.approx(top, abs=60.0)
    page.locator("#live summary").click()
    assert SHOWN in page.locator("#live li").inner_text()
    assert page.locator("img").count() == 0
    assert page.evaluate("typeof pwned") == "undefined"
    assert page.locator("#live [role=status]").first.inner_text().startswith("3 of 4")
    assert live.asked <= {"", "status.json", "favicon.ico"}
    assert live.told == []


@pytest.mark.parametrize("live", [AWAY], indirect=True, ids=["away"])
def test_an_idle_page_renews_itself_and_stays_when_the_server_is_stopped(live) -> None:
    live.wait_until_ready()
    assert live.page.locator("#experiments tbody tr").count() == 0
    live.sweep.end(0, 60.0, recorded=record(0))
    live.page.locator("#experiments tbody tr").wait_for()
    live.wait_until_ready()
    live.server.socket.close()
    live.server.shutdown()
    live.wait_for("dpprof watch does not answer; it may have been stopped.")
    live.wait_for("1 of 4 runs done")
    assert live.page.locator("h1").count() == 1
