"""The inspection page in a real browser, opened from a file without network access."""

import dataclasses
import random
import time

import numpy as np
import pytest
from page_helpers import NO_BROWSER, Page, browsing, contrast, numbers

from mlx_snapkv import inspect_prompt
from mlx_snapkv.demo.questions import make_haystack, question_prompt
from mlx_snapkv.measure.inspection_page import page as page_of
from mlx_snapkv.measure.sentences import special_tokens

HOSTILE = (
    "</script><script>window.done = 1</script><!-- <script> --><img src=x onerror='window.done = 1'>"
    " naïve 日本語 👩‍🚀 &lt;b&gt; \u2028 $& DATA POLICY. "
)
RIGHT, END, TAB, ENTER = "\ue014", "\ue010", "\ue004", "\ue007"


@pytest.fixture(scope="module")
def driver():
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def asked(demo_llama):
    """Return a prompt about a document that starts and ends with tags, and its fact."""
    _, tokenizer = demo_llama
    document, facts = make_haystack(tokenizer, random.Random(4), 4, 800)
    return question_prompt(tokenizer, HOSTILE + document + HOSTILE, facts[0].question), facts[0]


@pytest.fixture(scope="module")
def found(demo_llama, asked):
    budgets = ("snapkv:budget=80,n_sink=4,n_window=32,lookahead=4", "streaming_llm:budget=80")
    return [inspect_prompt(*demo_llama, asked[0], 12, policy=policy) for policy in budgets]


@pytest.fixture
def page(driver, demo_llama, found, tmp_path):
    path = tmp_path / "kept.html"
    html = page_of(found, "</title><b>demo", special_tokens(demo_llama[1]))
    path.write_text(html, encoding="utf-8")
    page = Page(driver, path.as_uri())
    page.size(1300, 900)
    driver.get(page.url)
    yield page
    assert driver.get_log("browser") == []  # neither refusals nor errors
    assert page.run("return performance.getEntriesByType('resource').length") == 0


def tints(page):
    """Return the tint, 0 to 8, of each group of tokens in the first pane."""
    tint = r"Number((/k(\d)/.exec(span.className) ?? [0, 0])[1])"
    return page.run(f"return panes[0].spans.map((span) => {tint})")


@NO_BROWSER
def test_tags_in_a_prompt_are_shown_and_never_run(page, found, asked):
    assert page.run("return panes[0].spans.map((s) => s.textContent).join('')") == found[0].text
    assert HOSTILE in found[0].text
    assert page.run("return window.done") is None
    assert page.all(".document img, .document script, #about b") == []
    assert page("#about").text.startswith("</title><b>demo, ")
    assert [h.text for h in page.all("h2")] == [each.policy for each in found]
    assert asked[1].value in page.all(".sentences")[0].text
    assert asked[1].value not in page.all(".sentences")[1].text


@NO_BROWSER
def test_a_tint_is_the_share_of_heads_that_keep_a_token(page, found):
    kept, spans = found[0].kept, np.array(found[0].spans)  # (3, 2, n) and (n, 2)
    _, groups = np.unique(spans, axis=0, return_inverse=True)

    def wanted(part):
        sums = np.bincount(groups.ravel(), part.mean(axis=0))
        return np.ceil(8 * sums / np.bincount(groups.ravel())).tolist()

    assert tints(page) == wanted(kept.reshape(6, -1))
    page("#layer").send_keys(RIGHT, RIGHT)  # "all", then 0, then 1
    assert page("#layer-told").text == "layer 1"
    assert tints(page) == wanted(kept[1])
    page("#head").send_keys(RIGHT)
    assert tints(page) == wanted(kept[1, :1])
    assert page.all(".map button")[1].get_attribute("aria-pressed") == "true"
    page.all(".map button")[1].click()  # back to all layers, still for one head
    assert tints(page) == wanted(kept[:, 0])


@NO_BROWSER
def test_an_answers_token_shows_where_it_looked(page, found, asked):
    fact = asked[1]
    buttons = page.all(".answer")[0].find_elements("css selector", "button")
    assert "".join(b.text for b in buttons).strip().replace(" ", "") == fact.value.replace(" ", "")
    page.run("arguments[0].focus()", buttons[0])
    page.press(END)
    last = page.run("return document.activeElement")
    assert last == buttons[-1] and last.get_attribute("aria-pressed") == "true"
    marked = page.run("return panes[0].marked")
    positions = found[0].attended.positions[len(buttons) - 1, -1]
    first = [page.run("return panes[0].groupOf(arguments[0])", int(p)) for p in positions[:3]]
    assert set(first) <= set(marked)
    assert "To predict" in page.all(".told")[0].text and "attended to" in page.all(".told")[0].text
    page.press("\ue00c")  # Escape
    assert page.run("return panes[0].marked") == []
    # A click on a sentence scrolls to it in the text.
    ten = found[0].sentences[:10]
    late = max(range(len(ten)), key=lambda i: ten[i].start)
    page.all(".sentences button")[late].click()
    shown = page.run("return panes[0].shown.map((g) => panes[0].spans[g].textContent).join('')")
    assert shown.strip() == ten[late].text
    assert page.run("return panes[0].box.scrollTop") > 0


@NO_BROWSER
@pytest.mark.parametrize("width, dark", [(360, True), (1300, False)])
def test_the_page_fits_its_window_and_is_readable(page, width, dark):
    page.size(width, 800, dark)
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    for selector in ("body", ".quiet", ".document", ".document .k8", ".told"):
        assert contrast(page, selector) >= 4.5, selector
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(numbers(ground)) < 384) == dark
    for field in page.all("input, button"):
        assert field.accessible_name or not field.is_displayed()


@NO_BROWSER
def test_a_long_document_stays_usable(driver, tmp_path, found):
    """The document has 30,000 tokens, each in its own span."""
    n = 30_000
    positions = np.tile(np.arange(0, n, 16, dtype=np.int32), (*found[0].positions.shape[:2], 1))
    large = dataclasses.replace(
        found[0],
        tokens=tuple(range(n)),
        text="word " * n,
        spans=tuple((5 * i, 5 * i + 5) for i in range(n)),
        positions=positions,
        sentences=(),
    )
    path = tmp_path / "large.html"
    path.write_text(page_of([large, dataclasses.replace(large, policy="other")], "large"))
    assert path.stat().st_size < 5_000_000
    started = time.monotonic()
    driver.get(path.as_uri())
    page = Page(driver, path.as_uri())
    page("#layer").send_keys(RIGHT)
    assert page("#layer-told").text == "layer 0"
    assert page.run("return panes[0].spans.length") == n
    assert time.monotonic() - started < 25
