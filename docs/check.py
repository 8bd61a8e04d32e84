"""Looks at the built pages as readers do: `make docs-check`, after `make docs`.

Every internal link and anchor exists. In a headless Chromium no page writes an error to the console, none is wider than
a phone's screen, and the search finds what is asked. Prints what is wrong, and ends with 1 then.
"""

from __future__ import annotations

import functools
import html.parser
import http.server
import pathlib
import shutil
import sys
import threading
import urllib.parse

HTML = pathlib.Path(__file__).parent / "_build" / "html"
PHONE = 390  # pixels
SEARCHES = {  # what is asked -> a page among the first five
    "shard_zero3": "#fzero.shard_zero3",
    "fp8": "#term-FP8",
    "CUDA out of memory": "guides/running",
    "How do I keep norms in float32?": "guides/low-precision",
    "How do I resume on four ranks instead of two?": "guides/checkpoints",
    "Which stage do I need for 7B on 4 x 24 GiB?": "guides/zero",
}


class _Page(html.parser.HTMLParser):
    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.links, self.ids = list[str](), set[str]()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [x for x in (found.get("href"), found.get("src")) if x]
        self.ids |= {x for x in (found.get("id"), found.get("name")) if x}


def dead_links(pages: dict[pathlib.Path, _Page]) -> list[str]:
    said = []
    for path, page in pages.items():
        for link in page.links:
            url = urllib.parse.urlparse(link)
            if url.scheme or url.netloc:
                continue
            to = (path.parent / urllib.parse.unquote(url.path)).resolve() if url.path else path
            to = to / "index.html" if to.is_dir() else to
            name = urllib.parse.unquote(url.fragment)
            if not to.exists():
                said.append(f"{path.relative_to(HTML)}: no page {link}")
            elif name and to in pages and name not in pages[to].ids:
                said.append(f"{path.relative_to(HTML)}: no anchor {link}")
    return said


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def seen(paths: list[pathlib.Path]) -> list[str]:
    """What a browser shows to be wrong."""
    from playwright.sync_api import sync_playwright  # pyright: ignore[reportMissingImports]

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(HTML)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base, said = f"http://127.0.0.1:{server.server_port}/", list[str]()
    with sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": PHONE, "height": 844})
        where = ""
        page.on("console", lambda m: said.append(f"{where}: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda error: said.append(f"{where}: {error}"))
        page.route("**/*", lambda route: route.continue_() if route.request.url.startswith(base) else route.abort())
        for path in paths:
            where = str(path.relative_to(HTML))
            page.goto(base + where)
            widths = "[...document.querySelectorAll('html, .content')].map(x => x.scrollWidth)"  # where furo scrolls
            wide = max(page.evaluate(widths))
            if wide > PHONE:
                said.append(f"{where}: {wide} pixels wide on a screen of {PHONE}")
        for query, answer in SEARCHES.items():
            where = f"search.html?q={urllib.parse.quote(query)}"
            page.goto(base + where, wait_until="networkidle")
            links = page.locator("#search-results ul.search > li > a")
            links.first.or_(page.locator(".search-summary", has_text="did not match")).wait_for()
            first = [links.nth(i).get_attribute("href") or "" for i in range(min(links.count(), 5))]
            if not any(answer in link for link in first):
                said.append(f"search.html: {query!r} does not find {answer}, but {first}")
        browser.close()
    server.shutdown()
    return said


if __name__ == "__main__":
    paths = sorted(HTML.rglob("*.html"))
    if not paths:
        sys.exit("There are no pages. Run: make docs")
    if shutil.which("chromium") is None:
        sys.exit("Chromium is not here. Run: apt-get install chromium")
    said = dead_links({path.resolve(): _Page(path) for path in paths}) + seen(paths)
    print("\n".join([*said, f"{len(paths)} pages, {len(said)} faults"]))
    sys.exit(bool(said))
