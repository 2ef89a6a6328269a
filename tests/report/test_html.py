"""The HTML report in a real browser: nothing from the network, no overflow, both themes, keyboard, copy, filter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from reports import every_status, many

from oracle.cli import main
from oracle.report import history
from oracle.report.html import to_html
from tests.support.browser import launched, needs_chromium
from tests.support.paths import ROOT

SIZES = {"desktop": (1280, 900), "tablet": (800, 1000), "phone": (390, 844), "small": (320, 600)}
# Elements that stick out of the window, unless they lie in a box that scrolls.
OVERFLOW = """[...document.querySelectorAll('body *')]
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.scroll') && !e.closest('.skip'))
  .map(e => e.outerHTML.slice(0, 100))"""
CONTRAST = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const f = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest('svg')) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(e.outerHTML.slice(0, 120));
  }
  return poor;
}"""

pytestmark = needs_chromium()


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with launched() as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page with everything in it, one of 5,000 cases, one of the stored captures as `verify` writes it, a history."""
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in ("everything", "many", "captures", "history")}
    history.add(folder / "runs", every_status())
    found["history"].write_text(history.to_html(history.points(folder / "runs"), "every routine and subject"))
    found["everything"].write_text(to_html(every_status()))
    found["many"].write_text(to_html(many(5000, failing=True)))
    subject = ("--subject", "flashinfer.w8a8_rowmajor_scale")
    assert main(["verify", "--fixtures", str(ROOT / "fixtures"), *subject, "-q", "--html", str(found["captures"])]) == 0
    return found


@pytest.fixture
def view(browser: object, pages: dict[str, Path]) -> Iterator[object]:
    """Open a page; whatever it asks of the network or complains of is a failure."""
    opened = []

    def view(name: str, size: str = "desktop", theme: str = "light", **options: object) -> object:
        width, height = SIZES[size]
        window = {"width": width, "height": height}
        context = browser.new_context(viewport=window, **options)  # type: ignore[attr-defined]
        page = context.new_page()
        trouble: list[str] = []
        page.on("request", lambda r: r.url.startswith(("file:", "data:")) or trouble.append(r.url))
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        opened.append((context, trouble))
        page.goto(f"file://{pages[name]}?theme={theme}")
        return page

    yield view
    for context, trouble in opened:
        context.close()
        assert trouble == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["everything", "captures", "history"])
def test_nothing_sticks_out(view: object, name: str, size: str, theme: str) -> None:
    page = view(name, size, theme)  # type: ignore[operator]
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(OVERFLOW) == []


@pytest.mark.parametrize("size", ["phone", "small"])
def test_bits_are_seen_on_a_phone(view: object, size: str) -> None:
    """The bits of the worst elements stand inside the window, with no scrolling aside; a twin in one line does not."""
    page = view("captures", size)  # type: ignore[operator]
    outside = """[...document.querySelectorAll('details[open] .bits')]
      .filter(e => e.getBoundingClientRect().right > innerWidth || e.closest('.scroll').scrollWidth > innerWidth)"""
    assert page.locator(".bits:visible").count() >= 8
    assert page.evaluate(f"{outside}.length") == 0
    page.evaluate("document.querySelectorAll('.elements tr').forEach(e => { e.style.whiteSpace = 'nowrap'; })")
    page.evaluate("document.querySelectorAll('.elements td').forEach(e => { e.style.display = 'inline-block'; })")
    assert page.evaluate(f"{outside}.length") >= 8


def test_something_that_sticks_out_is_found(view: object) -> None:
    """The twin: one wide element is seen by both checks."""
    page = view("everything", "phone")  # type: ignore[operator]
    page.evaluate("document.querySelector('h2').style.width = '700px'")
    assert not page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert len(page.evaluate(OVERFLOW)) == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read(view: object, theme: str) -> None:
    """Every text has a contrast of 4.5 at least (WCAG 2.2 AA); a twin with grey text on grey must be found."""
    page = view("everything", "desktop", theme)  # type: ignore[operator]
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.evaluate(CONTRAST) == []
    page.evaluate("document.querySelector('h1').style.color = getComputedStyle(document.body).backgroundColor")
    assert len(page.evaluate(CONTRAST)) == 1


def test_what_fails_is_seen_first(view: object) -> None:
    """The known failure, its reason and the fault that reproduces it stand in the first window, at the top."""
    page = view("captures")  # type: ignore[operator]
    for words in ("flashinfer.w8a8_rowmajor_scale", "KNOWN FAILURE", "2 of 2 outputs wrong", "the kernel reads it as"):
        found = page.get_by_text(words).first
        assert found.is_visible()
        assert found.bounding_box()["y"] < SIZES["desktop"][1]
    assert page.get_by_text("row-major A scale read as").first.is_visible()
    picture = page.locator("svg.heat").first
    assert picture.bounding_box()["width"] > 400
    red = page.evaluate(
        """async () => { const image = new Image();
        image.src = document.querySelector('svg.heat image').getAttribute('href'); await image.decode();
        const canvas = document.createElement('canvas'); canvas.width = image.width; canvas.height = image.height;
        const c = canvas.getContext('2d'); c.drawImage(image, 0, 0);
        const d = c.getImageData(0, 0, image.width, image.height).data; let red = 0;
        for (let i = 0; i < d.length; i += 4) red += d[i] > d[i + 2] + 60; return red / (d.length / 4); }"""
    )
    assert red > 0.9


def test_themes(view: object) -> None:
    """The system's theme is followed; the button goes round and is remembered."""
    page = view("everything", theme="", color_scheme="dark")  # type: ignore[operator]
    paper = "getComputedStyle(document.body).backgroundColor"
    heat = "getComputedStyle(document.querySelector('.heat .dark')).visibility"
    due = "getComputedStyle(document.querySelector('.scale i')).backgroundColor"
    night = "rgb(20, 23, 26)", "visible", "rgb(27, 42, 52)"
    day = "rgb(255, 255, 255)", "hidden", "rgb(237, 244, 248)"
    assert tuple(map(page.evaluate, (paper, heat, due))) == night
    button = page.get_by_role("button", name="Theme")
    button.click()
    assert (button.text_content(), *map(page.evaluate, (paper, heat, due))) == ("Theme: light", *day)
    page.reload()
    assert tuple(map(page.evaluate, (paper, heat, due))) == day
    chosen = view("everything", theme="dark")  # type: ignore[operator]
    assert tuple(map(chosen.evaluate, (paper, heat, due))) == night


def test_keyboard(view: object) -> None:
    """The first stop is the skip link; summaries, links, scrolling boxes and buttons can all be reached."""
    page = view("everything")  # type: ignore[operator]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.tagName + '.' + document.activeElement.className"))
    assert {"BUTTON.", "BUTTON.copy", "SUMMARY.", "A.", "DIV.scroll"} <= reached
    summary = page.locator("#cases summary").first
    summary.focus()
    page.keyboard.press("Enter")
    assert summary.evaluate("s => s.parentElement.open")


def test_a_chip_leads_to_its_cases(view: object) -> None:
    page = view("everything")  # type: ignore[operator]
    page.locator(".matrix a.chip").last.click()
    page.wait_for_function("location.hash && document.querySelector(location.hash).open", timeout=5000)


def test_copy(view: object) -> None:
    page = view("everything", permissions=["clipboard-read", "clipboard-write"])  # type: ignore[operator]
    page.locator("button.copy:visible").first.click()
    page.get_by_text("Copied").wait_for(timeout=5000)
    assert page.evaluate("navigator.clipboard.readText()").startswith("fp8-oracle verify --case '")


def test_the_filter_has_a_name_and_a_description(view: object) -> None:
    """For a screen reader too; what it found is said in a live region, and it keeps its distance from the list."""
    page = view("everything", "phone")  # type: ignore[operator]
    field = page.get_by_role("searchbox", name="Filter the cases")
    assert "all of them must occur" in page.locator(f"#{field.get_attribute('aria-describedby')}").text_content()
    assert page.locator("#filtered").get_attribute("role") == "status"
    boxes = [page.locator(found).first.bounding_box() for found in (".filter", "#cases details")]
    assert boxes[1]["y"] - boxes[0]["y"] - boxes[0]["height"] >= 12


def test_filter_of_five_thousand(view: object) -> None:
    page = view("many")  # type: ignore[operator]
    page.locator("#filter").fill("routine_7 seed=47")
    page.locator("#filtered:not(:empty)").wait_for(timeout=10000)
    shown = page.evaluate("[...document.querySelectorAll('#cases tbody tr')].filter(r => !r.hidden).length")
    assert 0 < shown < 40


@pytest.mark.turns(4)
def test_without_scripts(view: object) -> None:
    """Nothing is lost but comfort: the buttons and the filter are not there, everything else is."""
    page = view("everything", java_script_enabled=False)  # type: ignore[operator]
    assert page.locator("button:visible").count() == 0
    assert page.get_by_role("heading", name="What fails, and why").is_visible()
