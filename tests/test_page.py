"""The page at /cache, in a real browser, of a real server."""

from __future__ import annotations

import json
import math
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import tiny
from engines import Redis
from playwright.sync_api import Browser, Locator, Page, ViewportSize, expect, sync_playwright
from server import Local, wait_until_written

from tieredkv import page

BROWSERS = (
    *("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"),
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
# A browser asks nobody but the page's server, and root may start it.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
)
HOSTILE = "<img src=x onerror=alert(1)><script>fetch('http://evil.example/')</script>"
# What a prefix is shown by has room for.
SHOWN = "<img src=x onerror="
LONG = "Here is the log of the last week: nobody moved, and the fog stayed. " * 12
DESK: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium as it is installed here."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no Chromium is installed (Debian: chromium-headless-shell)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("page") / "model")


@pytest.fixture(scope="module")
def loaded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """A server with hits of both tiers, a miss and a request that failed behind it."""
    folder = tmp_path_factory.mktemp("cold")
    with Local(model, folder) as before:
        before.chat(LONG)
        wait_until_written(folder)
    with Local(model, folder) as server:
        server.chat(LONG)
        server.chat(LONG + "And then?")
        for question in ("What does this do?", "Is it harmful?"):
            server.chat(f"{HOSTILE} {LONG} {question}")
        assert server.post({"model": HOSTILE, "messages": [{}]}).status == 400
        wait_until_written(folder)
        stats(server)
        # Texts of prefixes that were asked for are made with the next answer.
        server.chat("Hello")
        yield server


@pytest.fixture(scope="module")
def sharing(model: Path, redis: Redis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """A server with a hit of the remote tier behind it, and part of that in memory."""
    flags = ("--prompt-cache-remote", redis.url())
    with Local(model, tmp_path_factory.mktemp("other"), *flags) as other:
        other.chat(LONG)
        other.cache.flush(30)
        assert (shared := other.cache._store.sharing) is not None
        assert shared.uploader is not None
        assert shared.uploader.flush(30)
    with Local(model, tmp_path_factory.mktemp("own"), *flags) as server:
        server.chat(LONG + "And then?")
        server.chat(LONG + "And now?")
        yield server


@dataclass
class Visit:
    """A page that was opened, and what its browser did and said since."""

    page: Page
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def find(self, selector: str, **filters: Any) -> Locator:
        return self.page.locator(selector, **filters)


Open = Callable[..., Visit]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens the page of a server, on a clock that the test can turn."""
    contexts = []

    def open_page(server: Local, viewport: ViewportSize = DESK, **options: Any) -> Visit:
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        made = Visit(context.new_page())
        made.page.clock.install()
        made.page.on("request", lambda request: made.requests.append(request.url))
        made.page.on("console", lambda message: made.complaints.append(message.text))
        made.page.on("pageerror", lambda error: made.complaints.append(str(error)))
        made.page.goto(f"http://127.0.0.1:{server.port}/cache")
        expect(made.find("#link")).to_have_attribute("data-state", "live")
        return made

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def written(browser: Browser, loaded: Local) -> Callable[[str], str]:
    """The text that a call of the page's format.js returns."""
    blank = browser.new_page()
    blank.goto(f"http://127.0.0.1:{loaded.port}/cache/icon.svg")
    return lambda call: blank.evaluate(f"import('/cache/format.js').then(format => format.{call})")


def stats(server: Local) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/cache/stats") as answer:
        return dict(json.load(answer))


def shares(bar: Locator, whole: float) -> dict[str, float]:
    """What the parts of a bar stand for, by their class, when all of it stands for ``whole``."""
    widths = bar.evaluate(
        "bar => [...bar.children].map(i => [i.className, parseFloat(i.style.width)])"
    )
    return {name: width / 100 * whole for name, width in widths}


def exact(n: float) -> str:
    """Rounded half up, as browsers do."""
    return f"{math.floor(n + 0.5):,}"


# ---- what is served


def test_no_path_but_the_page_s_own_is_served() -> None:
    """If this failed, the page's paths could lead to other files of the machine."""
    assert page.asset("/cache") is not None
    for path in ("/cache/", "/cache/__init__.py", "/cache/../__init__.py", "/cache/%2e%2e/x", "/"):
        assert page.asset(path) is None, path


def test_the_page_s_files_name_nothing_outside_of_the_server() -> None:
    """If this failed, the page would need the internet, or tell others of its visits."""
    for file in resources.files(page).iterdir():
        if file.name.endswith((".html", ".css", ".js")):
            text = file.read_text().replace("http://www.w3.org/2000/svg", "")
            assert not re.search(r"https?:|//[a-z]+\.|@import", text), file.name
            for path in re.findall(r'"(/cache[^"]*)"', text):
                assert page.asset(path) is not None, (file.name, path)


def test_no_script_but_the_page_s_own_may_run(loaded: Local) -> None:
    """If this failed, a prompt that got into the page as HTML would be run by the browser."""
    with urllib.request.urlopen(f"http://127.0.0.1:{loaded.port}/cache") as answer:
        assert answer.headers["Content-Security-Policy"] == page.CONTENT_SECURITY_POLICY
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert "unsafe" not in page.CONTENT_SECURITY_POLICY
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{loaded.port}/cache/none.js")


def test_answers_to_the_page_are_not_logged(
    loaded: Local, capfd: pytest.CaptureFixture[str]
) -> None:
    """If this failed, an open page would fill the server's log with a line every two seconds."""
    stats(loaded)
    assert loaded.health() == 200
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{loaded.port}/v1/cache/none")
    logged = capfd.readouterr().err
    assert "/v1/cache/stats" not in logged
    assert "/health" in logged
    assert "/v1/cache/none" in logged


# ---- what is shown


def test_the_figures_are_those_of_the_statistics(loaded: Local, visit: Open) -> None:
    """If this failed, the page would show another share, or other tokens, than were counted."""
    told, seen = stats(loaded), visit(loaded)
    tokens = told["prompt_tokens"]
    cached, whole = tokens["hot"] + tokens["cold"], sum(tokens.values())
    assert {name for name, n in tokens.items() if n} == {"hot", "cold", "computed"}
    expect(seen.find("#rate")).to_have_text(f"{100 * cached / whole:.0f}%")
    expect(seen.find("#rate-note")).to_have_attribute("title", f"{exact(cached)} of {exact(whole)}")
    expect(seen.find("#avoided")).to_have_attribute("title", exact(cached))
    expect(seen.find("#hits")).to_have_attribute("title", exact(told["hits"]))


def test_the_tiers_bars_are_as_long_as_the_tiers_are_full(loaded: Local, visit: Open) -> None:
    """If this failed, a full tier could look empty."""
    told, seen = stats(loaded), visit(loaded)
    for name in ("hot", "cold"):
        tier = told[name]
        bar = shares(seen.find(f"#{name} .bar"), tier["cap_bytes"])
        assert sum(bar.values()) == pytest.approx(tier["bytes"], rel=0.01)
        size = f"{exact(tier['bytes'])} of {exact(tier['cap_bytes'])} bytes"
        expect(seen.find(f"#{name} .size")).to_have_attribute("title", size)
    expect(seen.find("#cold .path")).to_have_text(told["cold"]["directory"])


def test_each_request_says_where_its_tokens_came_from(loaded: Local, visit: Open) -> None:
    """If this failed, a request's bar or times would be those of another."""
    told, seen = stats(loaded)["requests"], visit(loaded)
    rows = seen.find("#requests tbody tr")
    expect(rows).to_have_count(len(told))
    assert {r["status"] for r in told} == {200, 400}
    for i, request in enumerate(told):
        row = rows.nth(i)
        names = ("hot", "cold", "remote", "computed")
        counts = {name: request[f"{name}_tokens"] for name in names}
        assert shares(row.locator(".bar"), sum(counts.values())) == pytest.approx(counts, rel=1e-3)
        for label, n in (("Hot", counts["hot"]), ("Cold", counts["cold"])):
            cell = row.locator(f'[data-label="{label}"]')
            expect(cell).to_have_attribute("title", exact(n))
        expect(row.locator(".status")).to_have_text(str(request["status"]))
        total = row.locator('[data-label="Total ms"]')
        shown = exact(request["total_ms"]) if request["total_ms"] >= 0.5 else "<1"
        expect(total).to_have_text(shown)


def test_the_chart_reads_out_the_minute_that_the_keys_choose(loaded: Local, visit: Open) -> None:
    """If this failed, the chart would be shut to who has no mouse, or read out other numbers."""
    told, seen = stats(loaded)["history"], visit(loaded)
    chart = seen.find("#chart")
    said = []
    chart.focus()
    for _ in told:
        said.append(chart.get_attribute("aria-valuetext"))
        chart.press("ArrowLeft")
    for name in ("hot", "cold", "computed"):
        found = re.findall(rf"{name} ([\d,]+)", "\n".join(filter(None, said)))
        assert sum(int(n.replace(",", "")) for n in found) == sum(m[name] for m in told)
    heights = seen.find("#chart rect.cold").evaluate_all(
        "all => all.map(r => r.height.baseVal.value)"
    )
    assert len(heights) == sum(m["cold"] > 0 for m in told)


def test_what_came_from_the_remote_tier_is_shown(sharing: Local, visit: Open) -> None:
    """If this failed, tokens of other machines would pass for computed ones, or for none."""
    told, seen = stats(sharing), visit(sharing)
    tokens = told["prompt_tokens"]
    assert tokens["hot"]
    assert tokens["remote"]
    cached, whole = sum(tokens.values()) - tokens["computed"], sum(tokens.values())
    expect(seen.find("#rate-note")).to_have_attribute("title", f"{exact(cached)} of {exact(whole)}")
    note = ", ".join(f"{name} {exact(tokens[name])}" for name in ("hot", "cold", "remote"))
    expect(seen.find("#avoided-note")).to_have_attribute("title", note)
    first = seen.find("#requests tbody tr").last
    cell = first.locator('[data-label="Remote"]')
    expect(cell).to_have_attribute("title", exact(tokens["remote"]))
    assert shares(first.locator(".bar"), whole)["remote"] > 0
    expect(seen.find("#chart rect.remote")).to_have_count(1)
    expect(seen.find("#counters")).to_contain_text("remote: blocks read")
    assert seen.complaints == []


def test_nothing_is_said_of_a_remote_tier_where_there_is_none(loaded: Local, visit: Open) -> None:
    """If this failed, most pages would have a source and a column that are always empty."""
    seen = visit(loaded)
    assert seen.find(".of-remote").count() > 3
    expect(seen.find(".of-remote").filter(visible=True)).to_have_count(0)
    assert "remote" not in (seen.find("#avoided-note").get_attribute("title") or "")
    spans = seen.find("#requests thead th[colspan], #requests thead td[colspan]")
    columns = seen.find("#requests thead tr:last-child th").filter(visible=True).count()
    assert sum(spans.evaluate_all("all => all.map(cell => cell.colSpan)")) == columns


def test_misses_are_listed_by_reason(loaded: Local, visit: Open) -> None:
    """If this failed, the page would hide why prompts had to be computed."""
    told, seen = stats(loaded)["misses"], visit(loaded)
    listed = seen.find("#misses li").evaluate_all(
        "all => all.map(li => [li.querySelector('code').textContent, "
        "Number(li.querySelector('b').textContent)])"
    )
    assert dict(listed) == told


def test_the_top_prefixes_are_those_of_the_statistics(loaded: Local, visit: Open) -> None:
    """If this failed, a button could pin another prefix than the one that it stands beside."""
    told, seen = stats(loaded)["prefixes"], visit(loaded)
    rows = seen.find("#prefixes tbody tr")
    expect(rows).to_have_count(len(told))
    assert told
    for i, prefix in enumerate(told):
        row = rows.nth(i)
        expect(row.locator(".lead code")).to_have_text(prefix["id"])
        expect(row.locator('[data-label="Size"]')).to_have_attribute(
            "title", f"{exact(prefix['bytes'])} bytes"
        )
        expect(row.locator('[data-label="Uses"]')).to_have_attribute("title", exact(prefix["uses"]))


def test_hostile_text_is_shown_as_text(loaded: Local, visit: Open) -> None:
    """If this failed, who sends a prompt could run a script in the operator's browser."""
    assert any(SHOWN in (prefix["text"] or "") for prefix in stats(loaded)["prefixes"])
    seen = visit(loaded)
    expect(seen.find("#prefixes .text", has_text=SHOWN).first).to_be_visible()
    expect(seen.find("#requests .model").nth(1)).to_have_attribute("title", HOSTILE)
    assert seen.find("main img, main script").count() == 0
    origin = f"http://127.0.0.1:{loaded.port}/"
    assert [url for url in seen.requests if not url.startswith(origin)] == []
    assert seen.complaints == []


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ("count(0)", "0"),
        ("count(999)", "999"),
        ("count(1234)", "1.2k"),
        ("count(9960)", "10k"),
        ("count(31415)", "31k"),
        ("count(999600)", "1.0M"),
        ("bytes(812)", "812 B"),
        ("bytes(999960)", "1.0 MB"),
        ("bytes(17179869184)", "17.2 GB"),
        ("share(0, 0)", "\N{EN DASH}"),
        ("share(0, 9)", "0%"),
        ("share(1, 1000)", "<1%"),
        ("share(999, 1000)", ">99%"),
        ("share(9, 9)", "100%"),
        ("duration(0)", "0 s"),
        ("duration(59.7)", "1 min"),
        ("duration(11520)", "3 h 12 min"),
        ("ago(1000, 1090)", "1 min ago"),
        ("ahead(null, 1000)", "never"),
        ("ahead(999, 1000)", "expired"),
        ("ahead(44199, 1000)", "in 12 h"),
        ("milliseconds(70060.2)", "70,060"),
        ("milliseconds(0.2)", "<1"),
        ("milliseconds(null)", "\N{EN DASH}"),
        ("modelName('/models/a/b-4bit/')", "b-4bit"),
    ],
)
def test_numbers_are_written_for_people(
    written: Callable[[str], str], call: str, text: str
) -> None:
    """If this failed, a number of the page would be rounded to another, or hard to read."""
    assert written(call) == text


# ---- how it behaves


def test_a_prefix_is_pinned_and_let_go_with_a_button(loaded: Local, visit: Open) -> None:
    """If this failed, the button would say that it pinned what it did not, or the reverse."""
    seen = visit(loaded)
    row = seen.find("#prefixes tbody tr").first
    name = row.locator("code").text_content()
    for verb, done, is_pinned in (("Pin", "Pinned", True), ("Unpin", "Unpinned", False)):
        row.get_by_role("button", name=f"{verb} prefix {name}").click()
        expect(seen.find("#pin-result")).to_contain_text(f"{done} {name}: ")
        (told,) = [p for p in stats(loaded)["prefixes"] if p["id"] == name]
        assert told["pinned"] is is_pinned
        seen.page.clock.run_for(2000)
        expect(row.locator(".state")).to_have_text("pinned" if is_pinned else "")


def test_a_pin_that_is_refused_says_why(loaded: Local, visit: Open) -> None:
    """If this failed, a prefix would be believed to stay that may go at any time."""
    seen = visit(loaded)
    answer = json.dumps({"error": {"message": "too much is pinned"}})
    seen.page.route("**/v1/cache/pin", lambda call: call.fulfill(status=409, body=answer))
    seen.find("#prefixes button").first.click()
    expect(seen.find("#pin-result")).to_contain_text("too much is pinned")
    expect(seen.find("#pin-result")).to_have_class("result failed")


def test_a_server_that_is_gone_is_said_to_be(model: Path, tmp_path: Path, visit: Open) -> None:
    """If this failed, old values would pass for the present ones."""
    with Local(model, tmp_path) as server:
        server.chat("Hello")
        seen = visit(server)
        before = seen.find("#rate-note").text_content()
    seen.page.clock.run_for(2000)
    expect(seen.find("#lost")).to_be_visible()
    expect(seen.find("#lost")).to_contain_text("can't be reached. Since ")
    expect(seen.find("#announce")).to_have_text("The server can't be reached.")
    assert seen.find("#rate-note").text_content() == before
    with Local(model, tmp_path, port=server.port) as again:
        seen.page.clock.run_for(2000)
        expect(seen.find("#lost")).to_be_hidden()
        assert stats(again)["requests"] == []
        expect(seen.find("#start")).to_be_visible()


def test_a_page_that_nobody_sees_asks_nothing(loaded: Local, visit: Open) -> None:
    """If this failed, forgotten tabs would keep the server busy."""
    seen = visit(loaded)
    hide = "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}})"
    tell = "document.dispatchEvent(new Event('visibilitychange'))"
    seen.page.evaluate(f"{hide.format('true')}; {tell}")
    before = len(seen.requests)
    seen.page.clock.run_for(20_000)
    assert len(seen.requests) == before
    with seen.page.expect_response("**/v1/cache/stats"):
        seen.page.evaluate(f"{hide.format('false')}; {tell}")


def test_a_chosen_theme_is_kept(loaded: Local, visit: Open) -> None:
    """If this failed, the page would be too bright or too dark again after each reload."""
    seen = visit(loaded, color_scheme="dark")
    color = "getComputedStyle(document.body).backgroundColor"
    dark = seen.page.evaluate(color)
    seen.find("#theme").click()
    light = seen.page.evaluate(color)
    assert light != dark
    seen.page.reload()
    expect(seen.find("#theme")).to_have_text("Theme: light")
    assert seen.page.evaluate(color) == light


@pytest.mark.parametrize("viewport", [PHONE, {"width": 768, "height": 1024}, DESK])
def test_the_page_fits_its_window(loaded: Local, visit: Open, viewport: ViewportSize) -> None:
    """If this failed, the page would have to be pushed sideways."""
    seen = visit(loaded, viewport)
    assert seen.page.evaluate("document.documentElement.scrollWidth") == viewport["width"]
