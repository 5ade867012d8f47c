"""Start the server with its command, and open its page in a real browser."""

import contextlib
import re
import shutil
import time
from dataclasses import dataclass

import pytest
from server_helpers import served_process

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NO_BROWSER = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="chromium and chromedriver are not installed"
)
FLAGS = "--headless --no-sandbox --disable-gpu --disable-background-networking"
SERVE = "--snapkv budget=25%,n_sink=4,n_window=32,min_ctx=256,lookahead=4"


def serving(*options):
    """Yield the url and the process of `mlx-snapkv serve` with the given options."""
    return served_process(*SERVE.split(), "--prefill-step-size", "512", *options)


@contextlib.contextmanager
def browsing():
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@dataclass
class Page:
    """What a person does on the page, and what the page shows."""

    driver: object
    url: str

    def open(self):
        self.size(1100, 760)
        self.driver.get(self.url)
        self.wait(lambda: self("#model").text or self("#key-form").is_displayed())

    def __call__(self, selector):
        return self.all(selector)[-1]

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, is_so):
        until = time.monotonic() + 20
        while not is_so():
            assert time.monotonic() < until, self("body").text
            time.sleep(0.02)

    def press(self, *keys):
        """Press keys, which go to the focused element."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def clipboard(self, call, *arguments):
        """Call a method of `navigator.clipboard`, and return its result."""
        rights = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
        self.driver.execute_cdp_cmd("Browser.grantPermissions", rights)
        script = f"navigator.clipboard.{call}.then(arguments[arguments.length - 1])"
        return self.driver.execute_async_script(script, *arguments)

    def paste(self, text):
        """Paste text from the clipboard using the keyboard."""
        self.clipboard("writeText(arguments[0])", text)
        self.press("\ue009", "v", "\ue000")  # Control

    def drop(self, path):
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            event = {"type": kind, "x": 300, "y": 300, "data": data}
            self.driver.execute_cdp_cmd("Input.dispatchDragEvent", event)
        self.wait(lambda: self.all("#documents li") or self("#problem").text)

    def ask(self, question):
        """Ask a question using the keyboard, and return the complete answer."""
        self.press(question, "\ue007")  # Enter
        return self.answered()

    def answered(self):
        self.wait(lambda: self(".text").get_attribute("aria-busy") == "false")
        return self(".text").text

    def figures(self):
        return {dd.get_attribute("data-figure"): dd.text for dd in self.all(".turn:last-child dd")}

    def size(self, width, height, dark=False):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def numbers(colour):
    """Return red, green and blue, 0 to 255, of a colour as browsers print it. Mixed colours have another form."""
    found = [float(n) for n in re.findall(r"[\d.]+(?:e-\d+)?", colour)[:3]]
    return [255 * n for n in found] if colour.startswith("color(srgb") else found


def contrast(page, selector):
    """Return the contrast between a text and its background, as defined in WCAG 2."""
    text, ground = page.run(
        """let e = document.querySelector(arguments[0]);
        const text = getComputedStyle(e).color;
        while (getComputedStyle(e).backgroundColor === "rgba(0, 0, 0, 0)") e = e.parentElement;
        return [text, getComputedStyle(e).backgroundColor];""",
        selector,
    )
    light, dark = sorted(map(luminance, (text, ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
              for c in (n / 255 for n in numbers(colour))]  # fmt: skip
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
