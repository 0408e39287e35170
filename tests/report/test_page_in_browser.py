"""The HTML report in a real browser, opened from disk and without a network."""

import itertools
import json
import os
import statistics
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from asked import make_found
from browsing import SIZE, Opened
from factory import (
    make_capacity,
    make_experiment,
    make_manifest,
    tables_of_runs,
    write_runs,
    write_synthetic_verdict,
)
from html_pages import (
    METHODS,
    MIB,
    list_steps,
    read_content,
    record_rows,
    tables_of,
    write_html,
    write_results,
)
from products import one_in
from scripts import ASKED, HERE, call

from dpprof.experiments.accounting.plan import AtEpsilon, NoisePlan, describe_noise, schedule
from dpprof.experiments.launch import accounting_run
from dpprof.experiments.records.result import read_result
from dpprof.results.analysis.collection import collect
from dpprof.results.analysis.difference.difference import share_axis
from dpprof.results.analysis.difference.waterfall import list_holdings, subtract
from dpprof.results.analysis.tables.build import build_tables
from dpprof.system.words import three_digits

HOSTILE = (
    "</script><script>pwned=1</script><img src=x onerror=pwned=1> {{7*7}} ${7*7} a\u202eb =1+1"
)
SHOWN = HOSTILE.replace("\u202e", "⟨U+202E⟩")

SWEPT = Path(os.environ.get("DPPROF_SWEEP", "nowhere"))
"""The results of a sweep that was really run; ``.ci/run`` runs the default one and says where."""

NEXT_FRAME = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    log = root / "results" / "logs" / "x.log"
    log.parent.mkdir(parents=True)
    log.write_text("first\n" * 99 + f"the last line {HOSTILE}\n", encoding="utf-8")
    manifest = write_results(root, outcome="crashed", message=HOSTILE)
    tables = tables_of(root, manifest)
    tables["runs"]["error_log"] = tables["runs"]["error_log"].where(
        tables["runs"]["error_log"].isna(), "results/logs/x.log"
    )
    write_html(root, tables)
    return root / "results"


@pytest.fixture(scope="module")
def opened(browser, results):
    one = Opened(browser, results / "report.html", accept_downloads=True)
    yield one
    one.context.close()


def json_of(results, method, instrument, replicate=0):
    (path,) = results.glob(f"{instrument}/*-{method}-b2-*.r{replicate}.json")
    return json.loads(path.read_text())


def test_it_opens_from_disk_and_asks_for_nothing(opened, results) -> None:
    assert opened.told == []
    assert opened.asked == [(results / "report.html").as_uri()]
    assert opened.page.locator("figure.chart svg").count() == 9
    assert opened.page.title() == opened.page.locator("h1").inner_text()


def test_a_column_sorts_up_and_down_by_key(opened, results) -> None:
    table = opened.page.locator("#experiments .table").first
    head = table.locator("th", has_text="step (ms)")
    times = {method: json_of(results, method, "clean")["time"]["median_s"] for method in METHODS}

    head.locator("button").focus()
    for direction in ("ascending", "descending"):
        opened.page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == direction
        names = table.locator("tbody th").all_inner_texts()
        ordered = sorted(METHODS, key=times.get, reverse=direction == "descending")
        assert names == [*ordered, "opacus-ew"]  # unknown comes last
    cells = table.locator("tbody tr").first.locator("td").all_inner_texts()
    assert f"{max(times.values()) * 1e3:.1f}" in cells


def test_a_filter_keeps_the_rows_with_all_its_words(opened) -> None:
    table = opened.page.locator("#experiments .table").first
    field = table.get_by_label("Filter")
    field.fill("opacus ok")
    names = table.locator("tbody th").all_inner_texts()
    assert sorted(names) == ["opacus-ghost", "opacus-hooks"]
    assert table.get_by_role("status").inner_text() == "2 of 5 rows"
    field.fill("nothing has these words")
    assert table.locator("tbody tr").count() == 0
    field.fill("")
    assert table.locator("tbody tr").count() == len(METHODS) + 1


def test_pointing_at_a_point_tells_its_experiment_and_a_click_opens_it(opened, results) -> None:
    points = opened.page.locator("#tradeoff svg .mark-symbol.role-mark path")
    assert points.count() == len(METHODS)
    told = {opened.hint_at(points.nth(at)).splitlines()[0] for at in range(len(METHODS))}
    assert told == set(METHODS)

    told = opened.hint_at(points.nth(1))
    method = told.splitlines()[0]
    median = json_of(results, method, "clean")["time"]["median_s"]
    assert f"{median * 1e3:.1f} ms a step" in told
    points.nth(1).click()
    assert opened.page.locator("#experiment h3").first.inner_text().startswith(f"{method}: ")
    assert opened.page.evaluate("document.activeElement.id") == "experiment-title"


def test_pointing_at_an_instant_tells_operator_phase_and_components(opened, results) -> None:
    one = make_experiment(method="opacus-hooks")
    opened.page.locator("#experiments button.open", has_text="opacus-hooks").click()
    opened.settle()
    assert one.id in opened.page.locator("#experiment .id").inner_text()
    stripes = opened.page.locator("#experiment svg .mark-rect.role-mark").last.locator("path")
    assert stripes.count() == 3
    told = opened.hint_at(stripes.nth(1))

    peak = json_of(results, "opacus-hooks", "memory")["memory"]
    sizes = peak["at_peak"]["components"]
    assert "backward, after operator 4 of 10" in told
    assert f"the peak: bmm in {peak['at_peak']['module']}" in told
    assert f"{sum(sizes.values()) / 2**20:.1f} MiB live" in told
    lines = [line.partition(":")[0] for line in told.splitlines()[3:]]
    most = sorted((name for name in sizes if sizes[name]), key=sizes.get, reverse=True)
    assert lines == [name.replace("_", " ") for name in most]


def read_holdings(results, method, instrument) -> Counter:
    """Sum the bytes in a result file by component, layer, operator and phase."""
    held = json_of(results, method, instrument)["memory"]["at_peak"]["holdings"]
    sums = Counter()
    names = ("component", "layer", "op", "phase")
    for *key, size in zip(*(held[name] for name in (*names, "bytes")), strict=True):
        sums[tuple(key)] += size
    return sums


def assert_any_two_differ_as_their_files_say(opened, results, steps) -> None:
    files = [results / kind / f"{name}.r{number}.json" for name, kind, number in steps]
    peaks = [json.loads(path.read_text())["memory"]["peak_allocated_bytes"] for path in files]
    pairs = [*itertools.permutations(range(len(steps)), 2)]

    assert len(pairs) >= 12
    assert opened.subtract(pairs) == [
        f"The peaks differ by {peaks[a] - peaks[b]:,} bytes; the bars leave 0 bytes."
        for a, b in pairs
    ]


def test_the_waterfall_of_any_two_sums_to_the_difference_of_their_files(opened, results) -> None:
    steps = list_steps(results / "report.html")

    assert len(steps) == 2 * len(METHODS)
    assert_any_two_differ_as_their_files_say(opened, results, steps)


def test_a_real_sweeps_page_is_what_its_files_say(open_page) -> None:
    if not (SWEPT / "report.html").is_file():
        pytest.skip("DPPROF_SWEEP names no results with a page")
    opened = open_page(SWEPT / "report.html", accept_downloads=True)
    assert opened.told == []
    times = defaultdict(list)
    for path in (SWEPT / "clean").glob("*.json"):
        document = json.loads(path.read_text())
        if document["outcome"] == "ok":
            times[path.name.rpartition(".r")[0]].append(document["time"]["median_s"])
    medians = {name: statistics.median(some) for name, some in times.items()}
    timed = [row for row in opened.save("experiments") if row["median_step_s"]]

    told = {row["experiment_id"]: float(row["median_step_s"]) for row in timed}
    assert told == pytest.approx(medians, rel=1e-8)
    steps = list_steps(SWEPT / "report.html")[:12]
    assert_any_two_differ_as_their_files_say(opened, SWEPT, steps)


def test_the_waterfall_as_a_file_is_what_the_result_files_say(opened, results) -> None:
    opened.choose("compare", "A", "opacus-hooks, recorded")
    opened.choose("compare", "B", "flash-bk, predicted")
    rows = opened.save("waterfall")
    a = read_holdings(results, "opacus-hooks", "memory")
    b = read_holdings(results, "flash-bk", "estimate")
    expected = {
        (component, layer or "", f"{op} ({phase})"): (a[key], b[key])
        for key in a | b
        for component, layer, op, phase in [key]
    }
    names = ("component", "layer", "operator")
    assert expected == {
        tuple(row[name] for name in names): (int(row["a_bytes"]), int(row["b_bytes"]))
        for row in rows
    }
    assert sum(int(row["difference_bytes"]) for row in rows) == a.total() - b.total()


def test_the_waterfall_can_be_looked_into_by_layer_and_operator(opened, results) -> None:
    opened.choose("compare", "A", "opacus-hooks, recorded")
    opened.choose("compare", "B", "standard, recorded")
    files = [
        read_result(next(results.glob(f"memory/*-{method}-b2-*.json")))
        for method in ("opacus-hooks", "standard")
    ]
    bars = subtract(*map(list_holdings, files))
    first = next(bar for bar in bars if bar.name == "per_sample_gradients")
    view = opened.page.locator("#compare")

    view.get_by_label("Look into").select_option(index=1)
    assert view.locator(".sum").inner_text() == f"The bars sum to {first.difference_bytes:,} bytes."
    opened.settle()
    largest = first.bars[0]
    view.get_by_label("Look into").select_option(index=1)
    assert largest.difference_bytes > 0
    assert (
        view.locator(".sum").inner_text() == f"The bars sum to {largest.difference_bytes:,} bytes."
    )
    rows = opened.save("difference")
    assert [(row["name"], int(row["difference_bytes"])) for row in rows] == [
        (bar.name, bar.difference_bytes) for bar in largest.bars
    ]
    view.get_by_role("button", name="All", exact=True).click()
    assert "the bars leave 0 bytes" in view.locator(".sum").inner_text()


def test_both_steps_stand_on_one_axis(opened, results) -> None:
    opened.choose("compare", "A", "opacus-ghost, recorded")
    opened.choose("compare", "B", "standard, predicted")
    lines = [
        read_result(next(results.glob(f"{instrument}/*-{method}-b2-*.json"))).memory.timeline
        for method, instrument in (("opacus-ghost", "memory"), ("standard", "estimate"))
    ]
    shared = share_axis(*lines)
    rows = opened.save("both-steps")
    for side, curve in (("A", shared.a), ("B", shared.b)):
        mine = [row for row in rows if row["run"] == side]
        assert [float(row["position"]) for row in mine] == pytest.approx(curve.at)
        assert [int(row["live_bytes"]) for row in mine] == curve.total_bytes


def test_every_view_saves_its_data(opened, results) -> None:
    names = opened.page.locator("main > section [data-csv]").evaluate_all(
        "(buttons) => buttons.map((button) => button.dataset.csv)"
    )
    views = ["tradeoff", "experiments", "timeline", "peaks", "kernels", "roofline", "accuracy"]
    assert set(names) >= {*views, "difference", "both-steps", "outcomes", "failures"}
    saved = {name: opened.save(name) for name in views}
    assert all(saved.values())
    medians = {row["method"]: row["median_step_s"] for row in saved["experiments"]}
    for row in saved["peaks"]:
        memory = json_of(results, row["method"], "memory")["memory"]
        assert int(row["peak_bytes"]) == memory["attribution"]["timeline_peak_bytes"]
    for method in METHODS:
        assert float(medians[method]) == json_of(results, method, "clean")["time"]["median_s"]
    idle = {row["method"]: row["seconds"] for row in saved["kernels"] if row["op_kind"] == "idle"}
    assert set(idle.values()) == {"0.001"}


def test_predicted_step_times_stand_beside_measured_ones(open_page, results) -> None:
    # A page of its own, since Chromium lets a page save ten files.
    opened = open_page(results / "report.html", accept_downloads=True)
    times = opened.save("predicted-times")
    assert {row["method"] for row in times} == set(METHODS)
    for row in times:
        told = json_of(results, row["method"], "estimate")["time"]["predicted_step_s"]
        measured_s = json_of(results, row["method"], "clean")["time"]["median_s"]
        found = [float(row[name]) for name in ("predicted_step_s", "low_s", "high_s")]
        assert found == pytest.approx([told["median"], told["low"], told["high"]], rel=1e-8)
        assert float(row["measured_step_s"]) == measured_s
        assert row["inside"] == "true"


def test_hostile_text_stays_text_and_hidden_marks_are_shown(opened) -> None:
    page = opened.page
    message = page.locator("#outcomes details.log")
    assert SHOWN in message.locator("summary").inner_text()
    message.locator("summary").click()
    told = message.locator("pre").inner_text()
    assert told.splitlines()[-1] == f"the last line {SHOWN}"
    assert len(told.splitlines()) == 20
    assert page.locator("img").count() == 0
    assert page.evaluate("typeof pwned") == "undefined"
    (row,) = opened.save("failures")
    assert row["error_message"] == HOSTILE


def test_hostile_names_stay_text(open_page, tmp_path) -> None:
    manifest = write_results(tmp_path, methods=("standard", "opacus-ghost"))
    tables = {
        stem: table.replace({"opacus-ghost": HOSTILE, "head": HOSTILE})
        for stem, table in tables_of(tmp_path, manifest).items()
    }
    one = open_page(write_html(tmp_path, tables))
    assert one.told == []
    assert SHOWN in one.page.locator("#experiments").inner_text()
    for view in ("tradeoff", "peaks", "kernels"):
        assert SHOWN[:20] in one.page.locator(f"#{view} svg").text_content()  # long names are cut
    assert one.page.evaluate("typeof pwned") == "undefined"


def test_no_other_script_runs_and_nothing_is_fetched(open_page, tmp_path) -> None:
    file = write_html(tmp_path, tables_of(tmp_path, write_results(tmp_path, methods=())))
    injected = "<script>pwned = 1</script><img src='https://example.com/x.png' onerror='pwned = 1'>"
    page = file.read_text(encoding="utf-8")
    file.write_text(page.replace("</main>", f"</main>{injected}"), encoding="utf-8")
    one = open_page(file)
    fetched = "fetch('https://example.com').then(() => 'fetched', () => 'refused')"
    assert one.page.evaluate(fetched) == "refused"
    assert one.page.evaluate("typeof pwned") == "undefined"
    refused = [told for told in one.told if "Content Security Policy" in told]
    # The script, the picture, what its failure would run, and what was fetched.
    assert len(refused) >= 3, one.told


def test_the_page_follows_the_system_into_the_dark(opened) -> None:
    brightness = """(name) => getComputedStyle(document.body)[name].match(/[0-9]+/g)
        .slice(0, 3).reduce((sum, part) => sum + Number(part), 0)"""
    title = opened.page.locator("#peaks svg .role-axis-title text").first
    light = title.get_attribute("fill")
    assert opened.page.evaluate(brightness, "backgroundColor") > 700

    def turn(scheme):
        opened.page.emulate_media(color_scheme=scheme)
        opened.page.evaluate(NEXT_FRAME)
        opened.settle()

    turn("dark")
    assert title.get_attribute("fill") != light
    assert opened.page.evaluate(brightness, "backgroundColor") < 150
    assert opened.page.evaluate(brightness, "color") > 600
    assert opened.told == []
    turn("light")
    assert title.get_attribute("fill") == light


def test_everything_is_named_and_reachable_by_key(opened) -> None:
    unnamed = """[...document.querySelectorAll('button, select, input, summary, a')]
        .filter((one) => one.offsetParent && !one.textContent.trim() && !one.labels?.length)
        .length"""
    assert opened.page.evaluate(unnamed) == 0
    heads = opened.page.locator("thead th")
    assert heads.count() == opened.page.locator("thead th[scope=col][aria-sort]").count()
    assert opened.page.locator("table").count() == opened.page.locator("table caption").count()
    links = opened.page.locator("nav a").evaluate_all(
        "(links) => links.map((link) => document.querySelector(link.getAttribute('href'))?.tagName)"
    )
    assert len(links) == 11
    assert set(links) == {"SECTION"}


def plan_given(privacy, lengths) -> list[NoisePlan]:
    """Plan the batch that is given, with a noise that no accountant was asked for."""
    told = []
    for length in lengths:
        of = schedule(privacy, length, privacy.batch_size)
        noise = {"noise_multiplier": 0.5, "same_batch_noise_multiplier": 0.5, "tokens": None}
        at = AtEpsilon(epsilon=privacy.epsilon[0], batch_size=of.batch_size, **noise)
        plan = {"tokens_per_sample": length, "batch_size": of.batch_size, "epsilons": [at]}
        told.append(NoisePlan(**plan, batches=[describe_noise(of, 0.5, None)]))
    return told


ENDS = ("", "_low", "_high")
TYPED = [
    ("flash-bk", 64, 51_200, 2),
    ("flash-bk", 63, 1_000_000, 0),
    ("standard", 64, 51_200, 2.5),
    ("standard", 1, 8_000, 1),
    ("flash-bk", 4096, 2_000_000_000, 3.21),
]


def test_the_calculator_answers_as_budget_does(
    open_page, keep_capacities, tmp_path, monkeypatch
) -> None:
    keep_capacities(tmp_path / "asked", [*ASKED, *HERE, "--execution=eager"], make_found)
    monkeypatch.setattr(accounting_run, "account_apart", plan_given)
    files = sorted((tmp_path / "asked" / "results" / "capacity").glob("*.json"))
    found = [(read_result(file).experiment, 0) for file in files]
    tables = build_tables(
        collect(make_manifest(*found, instrument="capacity"), tmp_path / "asked", partial=True)
    )
    opened = open_page(write_html(tmp_path / "page", tables))
    view = opened.page.locator("#calculator")
    for method, batch, tokens, price in TYPED:
        spent = [f"--batch-size={batch}", f"--tokens={tokens}", f"--price-per-hour={price}"]
        spent += ["--samples=1e5", "--epsilon=8", "--delta=1e-6", "--json=budget.json"]
        spent += ["--execution=eager"]
        done = call("budget", *ASKED, *HERE, *spent, cwd=tmp_path / "asked")
        assert done.returncode == 0, done.stderr
        costs = json.loads((tmp_path / "asked" / "budget.json").read_text())["methods"]
        (cost,) = (one for one in costs if one["method"] == method)
        hours = [three_digits(cost[f"gpu_hours{end}"]) for end in ENDS]

        opened.choose("calculator", "Method", method)
        labels = ("Samples in a step", "Tokens", "Price of a GPU for an hour")
        for label, value in zip(labels, (batch, tokens, price), strict=True):
            view.get_by_label(label).fill(str(value))
        unsure = " The method is not verified here to compute the right gradient."
        if method == "standard":
            [plain] = tables["advice"].query("method == 'standard'").to_dict("records")
            ratio, low, high = (three_digits(plain[f"over_first{end}"]) for end in ENDS)
            unsure = f" A sample takes {ratio} times as long as with flash-bk (90 % interval "
            unsure += f"{low} to {high})."
        assert view.get_by_role("status").inner_text() == (
            f"{cost['steps']:,} steps take {hours[0]} GPU hours (90 % interval {hours[1]} to "
            f"{hours[2]}) and cost {three_digits(cost['price'])}, with "
            f"{cost['micro_batch_size']} samples at a time on one l4."
            f"{unsure}"
        )
    view.get_by_label("Tokens").fill("")
    assert view.get_by_role("status").inner_text() == "Tokens: type a number above 0."
    assert opened.told == []


def test_the_calculator_offers_no_method_that_failed_verification(open_page, tmp_path) -> None:
    ghost, flash = (
        make_experiment(method=method, device="cuda", target="h200")
        for method in ("opacus-ghost", "flash-bk")
    )
    capacity = {"recorded": make_capacity()}
    runs = [(one, "capacity", capacity) for one in (ghost, flash)]
    write_synthetic_verdict(tmp_path, ghost, passed=False, reason="wrong")
    opened = open_page(write_html(tmp_path, tables_of_runs(tmp_path, *runs)))
    view = opened.page.locator("#calculator")

    methods = view.get_by_label("Method").locator("option")
    assert methods.all_inner_texts() == ["flash-bk"]
    assert view.get_by_role("status").inner_text().endswith("samples at a time on one h200.")


@pytest.mark.parametrize(("width", "scheme"), one_in(2, [380, 1280], ["light", "dark"]))
def test_axe_finds_nothing_wrong(open_page, results, width, scheme) -> None:
    axe = pytest.importorskip("axe_playwright_python.base", reason="no axe-core here")
    opened = open_page(results / "report.html", color_scheme=scheme)
    opened.page.set_viewport_size({"width": width, "height": 900})
    opened.settle()
    opened.page.evaluate(axe.AXE_SCRIPT)
    found = opened.page.evaluate("axe.run(document, {resultTypes: ['violations']})")

    told = [(one["id"], one["nodes"][0]["html"]) for one in found["violations"]]
    assert told == []


def test_a_narrow_page_does_not_scroll_sideways(opened) -> None:
    opened.page.set_viewport_size({"width": 360, "height": 900})
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 360
    opened.page.set_viewport_size(SIZE)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("only failures", "No experiment has both a time or FLOPs, and a peak."),
        ("one experiment", "Two runs of the instruments memory or estimate are needed."),
        ("nothing", "There is no experiment with a result."),
    ],
)
def test_there_is_a_sensible_page_of_little(open_page, case, sentence, tmp_path) -> None:
    methods = ("flash-bk",) if case == "one experiment" else ()
    failure = {"outcome": "oom", "message": "=no room"} if case == "only failures" else {}
    tables = tables_of(tmp_path, write_results(tmp_path, methods=methods, **failure))
    if case == "one experiment":
        tables["peaks"] = tables["peaks"].head(1)
    one = open_page(write_html(tmp_path, tables), accept_downloads=True)
    assert one.told == []
    assert sentence in one.page.locator("main").inner_text()
    assert ("no room" in one.page.locator("#outcomes").inner_text()) == bool(failure)
    if failure:  # a spreadsheet would run this text without the apostrophe
        assert one.save("failures")[0]["error_message"] == "'=no room"


def write_many(root, count) -> Path:
    """Write the page of many experiments, each with times, a recorded step and what it holds."""
    experiments = [make_experiment(method="flash-bk", batch_size=1 + at) for at in range(count)]
    runs = []
    for at, one in enumerate(experiments):
        timed = {"step_s": (0.01 + at / 1e4,), "peak_allocated_bytes": 20 * MIB + at}
        runs += [(one, "clean", timed), (one, "memory", {"recorded": record_long(at)})]
    return write_html(root, tables_of(root, write_runs(root, *runs)))


def record_long(number) -> dict:
    """A step of 300 instants and 400 holdings, unlike that of any other number."""
    rows = [
        ("saved_activations", f"blocks.{at}", op, "forward", 4096 * (1 + at + number))
        for at in range(200)
        for op in ("addmm", "gelu")
    ]
    recorded = record_rows(rows)
    peak = sum(size for *_, size in rows)
    names = ("parameters", "optimizer_state", "saved_activations", "gradients", "workspace")
    recorded["memory"]["timeline"] = {
        "ops": list(range(0, 900, 3)),
        "elapsed_s": None,
        "phase": ["forward"] * 100 + ["backward"] * 150 + ["step"] * 50,
        "components": {
            name: [
                peak // 10 + (at * 7919 * (1 + rank + number)) % (peak // 11) for at in range(300)
            ]
            for rank, name in enumerate(names)
        },
    }
    return recorded


@pytest.mark.slow
@pytest.mark.parametrize("count", [1_000, 10_000])
def test_a_page_of_many_experiments_is_small_and_says_what_it_leaves_out(count, tmp_path) -> None:
    file = write_many(tmp_path, count)

    assert file.stat().st_size <= 5_000_000
    assert read_content(file)["thinned"] != []
