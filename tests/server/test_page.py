"""The page in a real browser, used by keyboard and pointer."""

import random
import re

import httpx
import pytest
from page_helpers import NO_BROWSER, Page, browsing, contrast, numbers, serving

from mlx_snapkv.demo.questions import make_haystack

ESCAPE, ENTER, SHIFT, BACK, TAB = "\ue00c", "\ue007", "\ue008", "\ue000", "\ue004"


@pytest.fixture(scope="module")
def url():
    with serving() as (found, _):
        yield found


@pytest.fixture(scope="module")
def driver():
    with browsing() as found:
        yield found


@pytest.fixture
def page(driver, url):
    """Open the page and yield it. At the end, assert that its Content-Security-Policy has blocked nothing."""
    page = Page(driver, url)
    page.open()
    yield page
    told = [entry["message"] for entry in driver.get_log("browser")]
    assert not [message for message in told if "Content Security Policy" in message]


def test_the_page_needs_nothing_but_its_server(url):
    response = httpx.get(url)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert not re.search(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)\w", response.text)
    policy = response.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "connect-src 'self'"} <= set(policy)
    hashed = "script-src 'sha256-", "style-src 'sha256-"
    assert sum(rule.startswith(hashed) for rule in policy) == 2


@NO_BROWSER
def test_a_pasted_document_is_asked_about(page, document):
    text, facts = document
    page.paste(text)
    assert f"{len(text):,} characters" in page("#documents li").text
    assert page("#question").get_attribute("value") == ""
    assert page.ask(facts[0].question) == facts[0].value
    figures = page.figures()
    kept, read = (int(n.replace(",", "")) for n in figures["entries"].split(" of "))
    assert read > 1400 and kept == pytest.approx(read / 4, abs=2)
    before, after = map(float, re.fullmatch(r"(.+) MB → (.+) MB", figures["memory"]).groups())
    assert 0 < after < 0.3 * before
    assert re.fullmatch(r"\d+\.\d\d s", figures["first"]), figures
    assert re.fullmatch(r"[\d,]+ tokens/s", figures["speed"]), figures
    # The second question of the chat uses the prefix that was read for the first.
    assert page.ask(facts[1].question) == facts[1].value
    # Tokens whose queries vote are read again.
    assert int(page.figures()["cached"].replace(",", "")) > read - 256
    assert len(page.all(".turn")) == 2


@NO_BROWSER
def test_a_dropped_file_is_answered_from_kept_entries_and_from_all(page, document, tmp_path):
    text, facts = document
    (tmp_path / "village.txt").write_text(text)
    page.drop(tmp_path / "village.txt")
    assert page("#documents li").text.startswith("village.txt")
    assert page.ask(facts[2].question) == facts[2].value
    assert page(".asked summary").text.startswith("village.txt")
    page(".again").click()
    page.wait(lambda: page.all(".state")[1:] and page(".state").text == "The same answer as above")
    assert [answer.text for answer in page.all(".text")] == [facts[2].value] * 2
    kept, read = page.figures()["entries"].split(" of ")
    assert kept == read and not page(".again").is_displayed()
    assert page.run("return chat.messages.length") == 2  # the chat continues from the first answer
    page("#new").click()
    assert page.all(".turn, #documents li") == [] and page("#empty").is_displayed()
    page.drop(tmp_path / "village.txt")
    page("#documents button").click()
    assert page.all("#documents li") == []
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    page.drop(tmp_path / "picture.png")
    assert "picture.png is not a text" in page("#problem").text


@NO_BROWSER
def test_answers_are_stopped_by_key_and_button(page, url, document, tmp_path):
    page.press("Hello", SHIFT, ENTER, BACK, "you", ENTER)  # the model's answer never ends
    page.wait(lambda: len(page(".text").text) > 100)
    assert page(".asked p").text == "Hello\nyou"
    assert page("#stop").is_displayed() and not page("#send").is_displayed()
    page.press(ESCAPE)
    page.answered()
    assert page(".state").text == "Stopped" and page("#send").is_displayed()
    assert page.run("return document.activeElement.id") == "question"
    # A question that is stopped while its prompt is read returns to the field.
    endless = tmp_path / "endless.txt"
    endless.write_text(document[0] * 8)
    page.drop(endless)
    page.press("What is it about?", ENTER)
    page.wait(lambda: page(".state").text.startswith("Reading"))
    assert page("progress").is_displayed()
    page("#stop").click()
    page.wait(lambda: len(page.all(".turn")) == 1)
    assert page("#question").get_attribute("value") == "What is it about?"
    assert page("#documents li").text.startswith("endless.txt")
    page.wait(lambda: "mlx_snapkv_open_requests 0.0" in httpx.get(f"{url}/metrics").text)


@NO_BROWSER
def test_tags_in_a_document_are_shown_and_never_run(page, document):
    tags = "<script>window.done = 1</script><img src=x onerror='window.done = 1'><b id=bold>"
    page.paste(f"{tags} {document[0]} {tags}")
    page.press(f"{tags} What is it?", ENTER)
    page.wait(lambda: page(".text").text)
    page.press(ESCAPE)
    page.answered()
    page(".asked summary").click()
    page.wait(lambda: page(".asked pre").text.startswith(tags))  # "toggle" follows the click
    assert page(".asked p").text.startswith(tags)
    assert page.all("#turns script, #turns img, #turns b") == []
    assert page.run("return window.done") is None


TAKE = """const turn = new Turn("Why?", []);
for (const delta of arguments[0]) turn.take({choices: [{delta}]});
turn.take({choices: [{delta: {}, finish_reason: "length"}]});
turn.end();"""
MARKDOWN = """# One `x`

Two **bold** and *slanted* and snake_case_names,
[a link](https://example.org/a) and [none](javascript:alert(1)) <b>not bold</b>

3. three
   - inner `<script>window.done = 1</script>`
4. four

> said
> on

| a | b |
|---|---|
| 1 | **2** |

```python
if a < b:
    print("<img src=x onerror='window.done = 1'>")

```
---
the end
"""


@NO_BROWSER
def test_answers_are_markdown_and_never_html(page):
    page.run(TAKE, [{"content": MARKDOWN[i : i + 7]} for i in range(0, len(MARKDOWN), 7)])
    tags = page.run("return [...document.querySelector('.text').children].map((e) => e.tagName)")
    assert tags == ["H2", "P", "OL", "BLOCKQUOTE", "TABLE", "DIV", "HR", "P"]
    for selector, text in {
        "h2 code": "x",
        "strong": "2",
        "em": "slanted",
        "a": "a link",
        "ol > li > ul code": "<script>window.done = 1</script>",
        "blockquote": "said\non",
        "td": "2",
        ".code span": "python",
        "p": "the end",
    }.items():
        assert page(f".text {selector}").text == text
    assert page(".text ol").get_attribute("start") == "3"
    assert page(".text a").get_attribute("href") == "https://example.org/a"
    for literal in ("<b>not bold</b>", "snake_case_names", "[none](javascript:alert(1))"):
        assert literal in page.all(".text p")[0].text
    assert page.all(".text script, .text img, .text b") == [] and len(page.all(".text a")) == 1
    page.clipboard("readText()")  # grants access to the clipboard
    page(".code button").click()
    page.wait(lambda: page(".code button").text == "Copied")
    code = MARKDOWN[MARKDOWN.index("if a") : MARKDOWN.index("\n```\n---")]
    assert page.clipboard("readText()") == code
    assert page.run("return window.done") is None


@NO_BROWSER
def test_chats_are_kept_until_the_page_is_closed(page, document):
    text, facts = document
    assert not page("#chats").is_displayed()
    page.paste(text)
    assert page.ask(facts[0].question) == facts[0].value
    page("#new").click()
    page.press("Hello", ENTER)  # the model's answer never ends
    page.wait(lambda: page(".text").text)
    first, second = page.all("#chats option")
    assert (first.text, second.text) == (facts[0].question, "Hello")
    first.click()  # stops the other chat's answer
    page.wait(lambda: not page.run("return running"))
    assert [asked.text for asked in page.all(".asked p")] == [facts[0].question]
    assert page.ask(facts[1].question) == facts[1].value
    page.all("#chats option")[1].click()
    assert page(".asked p").text == "Hello" and page(".state").text == "Stopped"


@NO_BROWSER
def test_reasoning_is_folded_and_a_skipped_compression_is_explained(page, demo_llama):
    text, facts = make_haystack(demo_llama[1], random.Random(13), 4, 150)
    page.press(text)
    assert page.ask(" " + facts[0].question) == facts[0].value
    assert "min_ctx=256" in page(".state").text
    page.run(TAKE, [{"reasoning": "<i>Let me see.</i>"}, {"content": "Because."}])
    assert page(".text").text == "Because." and page(".thought summary").text == "Reasoning"
    assert not page(".thought div").is_displayed()
    page(".thought summary").click()
    assert page(".thought div").text == "<i>Let me see.</i>"
    assert "reached its token limit" in page(".state").text


@NO_BROWSER
@pytest.mark.parametrize(("width", "dark"), [(360, True), (1100, False)])
def test_the_page_fits_its_window_and_is_readable(page, document, width, dark):
    page.size(width, 700, dark)
    page.paste(document[0])
    page.ask(document[1][0].question)
    page.drop(__file__)
    page.press("x" * 300)
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    assert page("#send").rect["x"] + page("#send").rect["width"] <= width
    for selector in ("body", ".asked p", ".figures dt", ".figures dd", "#send", "#model"):
        assert contrast(page, selector) >= 4.5, selector
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(numbers(ground)) < 384) == dark


@NO_BROWSER
def test_the_keyboard_reaches_everything_and_shows_where_it_is(page):
    seen = []
    for _ in range(7):
        seen.append(page.run("return document.activeElement.id"))
        page.press(TAB)
        style = page.run("return getComputedStyle(document.activeElement).outlineStyle")
        assert style != "none" or not page.run("return document.activeElement.id")
    assert {"question", "send", "new", "add"} <= set(seen)
    fields = page.all("textarea, input, button")
    assert all(field.accessible_name for field in fields if field.is_displayed())


@NO_BROWSER
def test_the_page_asks_for_the_key_of_a_server(driver, document):
    text, facts = document
    with serving("--api-key", "open-sesame", "--max-context", "4000") as (url, _):
        page = Page(driver, url)
        page.open()
        assert page("#key").is_displayed() and page("#key").accessible_name == "API key"
        assert "the API key is missing or wrong" in page("#problem").text
        page.press("wrong", ENTER)
        page.wait(lambda: page.run("return sessionStorage.length") == 0)
        assert page.run("return document.activeElement.id") == "key"
        page.press("open-sesame", ENTER)
        page.wait(lambda: not page("#key-form").is_displayed())
        assert page("#problem").text == "" and page("#model").text == "demo"
        page.paste(text)
        assert page.ask(facts[3].question) == facts[3].value
        # A refusal shows the server's own words and leaves the question in its field.
        page.paste(text * 3)
        page.press("What is it about?", ENTER)
        page.wait(lambda: page("#problem").text)
        assert "> 4000 maximum; shorten it" in page("#problem").text
        assert page("#question").get_attribute("value") == "What is it about?"
    page.press(ENTER)
    page.wait(lambda: "can't be reached" in page("#problem").text)
