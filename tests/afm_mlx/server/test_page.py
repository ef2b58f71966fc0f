"""The chat page in a real browser, on the real server with the embedded model."""

import asyncio
import contextlib
import hashlib
import json
import re
import threading
import time
from pathlib import Path

import pytest

from afm_mlx.server import answer_events
from afm_mlx.server.app import PAGE_TYPES, page_files
from tests.tools.browser import browser
from tests.tools.cases import each
from tests.tools.model_scripts import FollowsText
from tests.tools.server import running_server
from tests.tools.vision import picture
from tests.tools.vision_server import data_uri, in_base64, seeing_server, square
from tests.tools.zoo_chats import write_family_folder

ROOT = Path(__file__).parents[3]
SIZES = {"wide": (1440, 900), "narrow": (360, 740)}
FORMAL = "Make this formal:\nhey Hana, can't make it to the Film Lecture"
TODOS = (
    "List the to-dos: I am Maria. A stranger from Porto logged in as me. Can you call me at 14:30?"
)
HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
ENDLESS = {"type": "string", "minLength": 3000}
WAIT = 20_000  # milliseconds, on a machine that has much else to do

pytestmark = pytest.mark.xdist_group("browser")  # one process starts it, not each


@pytest.fixture(scope="module")
def windows():
    """A window of each size, and a list of their errors."""
    faults = []
    with browser() as chromium:
        pages = {}
        for size, (width, height) in SIZES.items():
            context = chromium.new_context(
                viewport={"width": width, "height": height}, reduced_motion="reduce"
            )
            context.set_default_timeout(WAIT)
            pages[size] = page = context.new_page()
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("console", lambda said: faults.append(said.text) if _is_fault(said) else None)
        yield pages, faults


@pytest.fixture
def open_page(windows, server):
    """Open the page in a browser without stored data; check at the end that it had no errors."""
    pages, faults = windows
    faults.clear()

    def opened(size="wide", scheme="light", url=server.url):
        page = pages[size]
        width, height = SIZES[size]
        page.set_viewport_size({"width": width, "height": height})
        page.unroute_all()
        page.emulate_media(color_scheme=scheme)
        page.goto(f"{url}/page/icon.svg")  # of the same origin, with no chat open
        page.evaluate(FORGET)
        page.goto(url)
        page.wait_for_selector("html[data-ready]")
        if url == server.url:
            page.wait_for_selector("#model option", state="attached")
        return page

    yield opened
    assert not faults


FORGET = """() => new Promise((resolve, reject) => {
  localStorage.clear();
  sessionStorage.clear();
  const forgetting = indexedDB.deleteDatabase("afm-mlx");
  forgetting.onsuccess = resolve;
  forgetting.onerror = forgetting.onblocked = reject;
})"""


def _is_fault(said):
    # Some tests cause error statuses, which the console reports, too.
    return said.type in ("error", "warning") and "Failed to load resource" not in said.text


def message(page):
    return page.get_by_label("Message", exact=True)


def send(page, text):
    """Send a message, and wait for the end of its answer."""
    before = page.locator(".answer").count()
    message(page).fill(text)
    message(page).press("Enter")
    return ended(page, before)


def reload(page):
    """Reload the page once its pending writes are done, which a browser may drop."""
    page.evaluate(
        """() => new Promise((done) => {
            const opening = indexedDB.open("afm-mlx");
            opening.onsuccess = () => {
                // It waits for the writes that were begun before it.
                const all = opening.result.transaction("conversations").objectStore("conversations").getAll();
                all.onsuccess = () => { opening.result.close(); done(); };
            };
        })"""
    )
    page.reload()


def ended(page, index):
    """The text of the answer with this index, once it has ended."""
    page.wait_for_selector(f".answer >> nth={index}")
    page.wait_for_selector("#send[aria-label='Send message']")
    return page.locator(".answer").nth(index).locator("> .text").inner_text()


def until(page, holds):
    """Wait for a function or an expression of the page to be true; the page itself allows no `eval`."""
    deadline = time.monotonic() + WAIT / 1000
    while not (holds() if callable(holds) else page.evaluate(holds)):
        assert time.monotonic() < deadline, holds
        page.wait_for_timeout(20)


def example(page, title):
    page.locator("#examples button", has_text=title).click()
    message(page).press("Enter")
    return ended(page, 0)


def import_chats(page, *chats):
    exported = {"format": "afm-mlx conversations", "version": 1, "conversations": list(chats)}
    content = json.dumps(exported).encode()
    page.set_input_files(
        "#import-file", {"name": "c.json", "mimeType": "application/json", "buffer": content}
    )


def chat_of(*texts):
    """A conversation with these texts, alternately of the user and the model."""
    turns, parent = {}, None
    for i, text in enumerate(texts):
        role = "assistant" if i % 2 else "user"
        turns[f"t{i}"] = {"parent": parent, "role": role, "created": i, "text": text}
        turns[f"t{i}"] |= {"model": "afm-nano", "end": "stop"} if i % 2 else {}
        parent = f"t{i}"
    return {"title": "Imported", "turns": turns, "head": parent, "settings": {}}


def requests_of(page):
    """A list that collects the bodies of the page's completion requests."""
    bodies = []

    def keep(request):
        if request.url.endswith("/completions"):
            bodies.append(request.post_data_json)

    page.on("request", keep)
    return bodies


def show_settings(page):
    button = page.get_by_role("button", name="Settings", exact=True)
    if button.get_attribute("aria-expanded") == "false":
        button.click()


def test_files_are_served_as_what_they_are_and_nothing_else(server):
    with server.http() as http:
        for name in page_files():
            found = http.get("/" if name == "index.html" else f"/page/{name}")
            assert found.content == page_files()[name]
            assert found.headers["content-type"] == PAGE_TYPES[name.rpartition(".")[2]]
            assert found.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in found.headers["content-security-policy"]
            assert "unsafe" not in found.headers["content-security-policy"]
            again = http.get(found.url, headers={"If-None-Match": found.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert http.head("/").status_code == 200
        for path in ("/page/", "/page/app.py", "/page/..%2fapp.py", "/page/vendor/LICENSE-marked"):
            assert http.get(path).status_code == 404
    html = page_files()["index.html"].decode()
    imported = set(re.findall(r'"page/([\w.]+)"', html))
    digest = hashlib.sha256(page_files()["vendor/marked.esm.js"]).hexdigest()
    assert digest in (ROOT / "docs" / "dependencies.md").read_text()
    for name, content in page_files().items():
        if name.startswith("vendor/"):
            continue
        if name.endswith(".js"):
            imported |= set(re.findall(r'from "\./([\w./]+\.js)"', content.decode()))
        if name != "icon.svg":  # which names its namespace
            assert not re.search(rb"https?://(?!www\.w3\.org/2000/svg)", content), name
    assert imported == page_files().keys() - {"index.html"}
    assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style", html)


def partial_json_is_read_as_far_as_it_goes(page):
    text = '{"a": [1, -2.5e3, true, null, "\\u00e9\\ud83d\\ude00\\n\\"x"], "b": {}, "": {"c": []}}'
    cut = {
        "": None,
        '{"a": "x\\u00': {"a": "x"},
        '{"a": 1, "b': {"a": 1},
        '{"a": 1, "b": tr': {"a": 1},
        '["x", {"y": [1,': ["x", {"y": [1]}],
        "12": 12,
    }
    wrong = ["[1,]", "01 ", "[1 2,", '{"a" 1,', '"\\x', "nul ", "]", "{} {", '{"a":1,}', '"\n']
    wrong.append("Hello")
    read = page.evaluate(
        """async ([text, cut, wrong]) => {
          const { readPartialJson } = await import("/page/json_tree.js");
          const fails = (text) => {
            try { readPartialJson(text); return false; } catch { return true; }
          };
          const prefixes = [...text].map((_, n) => text.slice(0, n));
          return {
            whole: [readPartialJson(text), readPartialJson(cut[0]).isWhole],
            prefixes: prefixes.filter((prefix) => fails(prefix) || readPartialJson(prefix).isWhole),
            cut: cut.map((text) => readPartialJson(text).value ?? null),
            wrong: wrong.filter((text) => !fails(text)),
          };
        }""",
        [text, list(cut), wrong],
    )
    assert read["whole"] == [{"value": json.loads(text), "isWhole": True}, False]
    assert read["cut"] == list(cut.values())
    assert read["prefixes"] == read["wrong"] == []


SHOW_MARKDOWN = """async ([text, streams]) => {
  const { showMarkdown } = await import("/page/markdown.js");
  const shown = document.createElement("div");
  for (let n = streams ? 1 : text.length; n <= text.length; n += 1) showMarkdown(shown, text.slice(0, n));
  return [shown.innerHTML, shown.textContent];
}"""
ESCAPED = HOSTILE.replace("<", "&lt;").replace(">", "&gt;")
MARKDOWN = {
    HOSTILE: f"<p>{ESCAPED}</p>",
    f"<div>\n{HOSTILE}\n</div>": f"<p>&lt;div&gt;<br>{ESCAPED}<br>&lt;/div&gt;</p>",
    "a **b** *c* `<i>`\nd": "<p>a <strong>b</strong> <em>c</em> <code>&lt;i&gt;</code><br>d</p>",
    "1. x\n   - y\n2. z": '<ol start="1"><li>x<ul><li>y</li></ul></li><li>z</li></ol>',
    "[a](javascript:alert(1)) ![c](https://d.e/f.png)": "<p>[a](javascript:alert(1)) ![c](https://d.e/f.png)</p>",
    "2 * 3 * 4 and snake_case_name": "<p>2 * 3 * 4 and snake_case_name</p>",
}  # fmt: skip


def markdown_is_shown_and_html_stays_text(page):
    def show(text, streams=True):
        html, content = page.evaluate(SHOW_MARKDOWN, [text, streams])
        assert not re.search(r"<(?:img|script)", html)
        return html, content

    for text, expected in MARKDOWN.items():
        assert show(text)[0] == expected
    assert show("- [ ] x\n- [x] y")[1] == "To do: xDone: y"
    assert show("[b](https://b.c)")[0].startswith('<p><a href="https://b.c"')
    assert "<code>&lt;b&gt;</code>" in show("```js\n<b>\n```")[0]
    assert f"<td>{ESCAPED}</td>" in show(f"| a | b |\n| --- | ---: |\n| {HOSTILE} | 2 |")[0]
    # Text that a parser of Markdown takes long for, or fails at, stays plain; code may have any marks.
    for hard in ("_a*" * 10_000, "> " * 2000 + "x"):
        assert show(hard, False)[1] == hard
    assert show("```\n" + "_a*" * 1000 + "\n```", False)[1] == "code" + "_a*" * 1000


def a_tree_fills_in_and_html_in_it_stays_text(page):
    page.evaluate(
        """() => {
          window.seen = [];
          new MutationObserver(() => {
            const keys = document.querySelectorAll(".answer .tree li li").length;
            const toCome = document.querySelectorAll(".answer .tree .pending").length;
            if (keys) window.seen.push(`${keys} ${toCome}`);
          }).observe(document.getElementById("thread"), { subtree: true, childList: true });
        }"""
    )
    example(page, "Extract an event")
    keys = page.locator(".tree li li .key").all_inner_texts()
    values = page.locator(".tree .value").all_inner_texts()
    assert keys == ["title", "person", "day", "time", "place"]
    assert values == ["Film Lecture", "Hana", "Monday", "22:55", "Gallery Sain"]
    seen = page.evaluate("window.seen")
    assert seen[0] == "5 5"  # all rows are shown before the first value
    assert seen[-1] == "5 0"
    page.get_by_role("button", name="Text", exact=True).click()
    assert json.loads(page.locator(".json .raw").inner_text()) == dict(
        zip(keys, values, strict=True)
    )

    schema = {"type": "object", "properties": {HOSTILE: {"const": HOSTILE}}, "required": [HOSTILE]}
    schema["additionalProperties"] = False
    page.get_by_role("button", name="JSON schema", exact=True).click()
    page.get_by_label("JSON schema", exact=True).fill(json.dumps(schema))
    send(page, HOSTILE)
    assert page.locator(".bubble").last.inner_text() == HOSTILE
    assert page.locator(".tree").last.locator("li li span").all_inner_texts() == [HOSTILE] * 2
    import_chats(page, chat_of(HOSTILE, HOSTILE))
    page.wait_for_selector("h1:has-text('Imported')")
    assert page.locator(".answer > .text").inner_text() == HOSTILE
    assert page.locator("#thread img, #thread script").count() == 0


def a_tool_is_called_and_its_result_answered(page):
    sent = requests_of(page)
    example(page, "Track an order")
    assert page.locator(".call .call-name").inner_text() == "track_order"
    assert page.locator(".call .tree li li span").all_inner_texts() == ["order", "L5526"]
    page.get_by_label("Result of track_order").fill('{"city": "Hitton", "arrives": "March 14"}')
    page.get_by_role("button", name="Send result").click()
    assert ended(page, 1) == "Order L5526 is in Hitton and arrives on March 14."
    assert [m["role"] for m in sent[-1]["messages"]] == ["user", "assistant", "tool"]
    assert sent[-1]["messages"][1]["tool_calls"][0]["id"] == sent[-1]["messages"][2]["tool_call_id"]
    page.get_by_role("button", name="Edit results").click()
    page.get_by_label("Result of track_order").fill('{"city": "Broburg", "arrives": "April 2"}')
    page.get_by_role("button", name="Send result").click()
    assert "Broburg" in ended(page, 1)
    assert "2 / 2" in page.locator(".results .pager").inner_text()


def settings_become_fields_of_the_request(page):
    sent = requests_of(page)
    show_settings(page)
    typed = {"Temperature": "0.5", "Top-p": "0.9", "Top-k": "20", "Min-p": "0.1", "Seed": "3"}
    typed |= {"Max tokens": "5", "Stop strings, one per line": "\\n\n# "}
    for label, value in typed.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("System prompt", exact=True).fill("Be brief.")
    send(page, FORMAL)
    asked = sent[-1]
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop")
    assert [asked[name] for name in names] == [0.5, 0.9, 20, 0.1, 3, 5, ["\n", "# "]]
    assert "token limit" in page.locator(".answer .note").inner_text()

    # An invalid setting is reported at its field, which takes the focus.
    page.get_by_label("Top-p", exact=True).fill("7")
    message(page).fill("x")
    message(page).press("Enter")
    assert page.evaluate("document.activeElement.name") == "top_p"
    assert page.locator("#problem-top_p").inner_text() == "Enter a number from 0 to 1."
    page.get_by_role("button", name="Reset to defaults").click()
    message(page).press("Enter")
    ended(page, 1)
    assert not any(name in sent[-1] for name in names)


REFUSED = [
    ("{", "not JSON"),
    ("{}", "not an export"),
    ({"version": 2}, "version 2"),
    ({"conversations": [{"turns": {"a": {"role": "user"}}}]}, "has no text"),
    ({"conversations": [{"turns": {"a": {"role": "user", "text": "", "parent": "b"}}}]}, "missing"),
    ({"conversations": [{"turns": {"a": {"role": "user", "text": "", "parent": "a"}}}]}, "circle"),
    ({"conversations": [{"turns": {}, "head": "__proto__"}]}, "last turn"),
]  # fmt: skip


def other_files_are_not_imported(page):
    for content, said in REFUSED:
        if not isinstance(content, str):
            base = {"format": "afm-mlx conversations", "version": 1, "conversations": []}
            content = json.dumps(base | content)
        page.set_input_files(
            "#import-file",
            {"name": "x.json", "mimeType": "application/json", "buffer": content.encode()},
        )
        assert said in page.locator(".toast").last.inner_text()
        page.get_by_role("button", name="Dismiss").click()
        assert page.locator(".conversation").count() == 0


def errors_are_shown_with_buttons(page):
    show_settings(page)
    page.locator("[name=format]").select_option("json_schema")
    page.get_by_label("JSON schema", exact=True).fill('{"type": "no type"}')
    send(page, FORMAL)
    reported = page.locator(".card.error p").inner_text()
    assert "no type" in reported
    page.get_by_role("button", name="Go to setting").click()
    assert page.evaluate("document.activeElement.name") == "schema"
    assert page.locator("#problem-schema").inner_text() == reported
    page.locator("[name=format]").select_option("text")

    page.context.set_offline(True)
    page.get_by_role("button", name="Try again").click()
    page.wait_for_selector(".card.error:has-text('The server can\\'t be reached.')")
    page.context.set_offline(False)
    page.get_by_role("button", name="Try again").click()
    assert "Film Lecture" in ended(page, 0)
    assert "3 / 3" in page.locator(".answer .pager").inner_text()

    # An interrupted stream keeps its text.
    half = 'data: {"choices": [{"delta": {"content": "Half an"}}]}\n\n'
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=half))
    assert send(page, "x") == "Half an"
    assert "lost before the answer was complete" in page.locator(".card.error").inner_text()
    failed = 'data: {"error": {"message": "The step failed."}}\n\n'
    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=half + failed))
    send(page, "x")
    assert "The step failed." in page.locator(".card.error").last.inner_text()
    page.unroute("**/v1/chat/completions")


def the_servers_counts_are_shown(page):
    usage = {
        "prompt_tokens": 300,
        "completion_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 256},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 9,
            "rejected_prediction_tokens": 3,
        },
    }
    timings = {"first_token_ms": 1234.5, "tokens_per_second": 8.25}  # without what a format forces
    last = {"choices": [], "usage": usage, "timings": timings}
    chunks = [{"choices": [{"delta": {"content": "Hello"}}]}, last]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body))
    assert send(page, "x") == "Hello"
    said = page.locator(".stats").inner_text()
    assert said == "12 tokens · 8 tok/s · first token after 1.23 s · 75 % of drafts accepted"
    page.get_by_role("button", name=re.compile("^Context: 312 of 1,024 tokens")).click()
    reported = page.locator("#figures div").all_inner_texts()
    assert reported[-2:] == ["Cached prompt tokens\n256", "Draft tokens accepted\n75 %"]
    page.unroute("**/v1/chat/completions")


@each(
    "story",
    [
        other_files_are_not_imported,
        partial_json_is_read_as_far_as_it_goes,
        markdown_is_shown_and_html_stays_text,
        a_tree_fills_in_and_html_in_it_stays_text,
        a_tool_is_called_and_its_result_answered,
        settings_become_fields_of_the_request,
        errors_are_shown_with_buttons,
        the_servers_counts_are_shown,
    ],
)
def test_one_chat_after_the_other(page, story):
    """All in one page, each in a new chat, because loading a page takes longer than most of them."""
    page.get_by_role("button", name="New chat").click()
    story(page)


@pytest.fixture
def page(open_page):
    return open_page()


KEEP_ANNOUNCEMENTS = """() => {
  window.said = [];
  const region = document.getElementById("announcements");
  const keep = () => region.textContent && window.said.push(region.textContent);
  new MutationObserver(keep).observe(region, { childList: true });
}"""


@pytest.mark.parametrize("size", SIZES)
def test_a_chat_with_edits_versions_adapters_and_a_reload(open_page, size):
    page = open_page(size)
    page.evaluate(KEEP_ANNOUNCEMENTS)
    first = send(page, FORMAL)
    assert "Film Lecture" in first
    # An answer is announced once, when it has ended.
    until(page, "window.said.length")
    assert page.evaluate("window.said") == [f"afm-nano answered: {first}"]
    live = page.locator("[aria-live], [role=log], [role=status], [role=alert]")
    ids = live.evaluate_all("(all) => all.map((each) => each.id)")
    assert ids == ["connection", "announcements"]

    page.get_by_label("Model", exact=True).select_option("afm-nano:todo")
    todos = send(page, TODOS)
    assert "Lock the account" in todos
    assert page.locator(".who").all_inner_texts() == ["afm-nano", "afm-nano:todo"]

    # An edited message is a new version; the old one keeps the turns after it.
    page.get_by_role("button", name="Edit message").first.click()
    page.locator(".edit-form textarea").fill("List the to-dos: call Hana at 9:15.")
    page.get_by_role("button", name="Send", exact=True).click()
    ended(page, 0)
    assert page.locator(".turn").count() == 2
    page.get_by_role("button", name="Regenerate").click()
    ended(page, 0)
    assert "2 / 2" in page.locator(".answer .pager").inner_text()
    page.locator(".user").get_by_role("button", name="Previous version").click()
    assert page.locator(".answer > .text").all_inner_texts() == [first, todos]
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Next version"

    reload(page)
    page.wait_for_selector(".answer >> nth=1")
    assert page.locator(".answer > .text").all_inner_texts() == [first, todos]
    assert page.get_by_role("heading", level=1).inner_text().startswith("Make this formal: hey")
    assert "of 1,024 tokens" in page.locator("#meter").get_attribute("aria-label")


def test_stopping_frees_the_row(open_page, server, monkeypatch):
    stream = server.served.engine.stream

    async def slow(*arguments, **options):
        """A slower stream, which a page on a busy machine has time to stop."""
        async with contextlib.aclosing(stream(*arguments, **options)) as responses:
            async for response in responses:
                await asyncio.sleep(0.01)
                yield response

    monkeypatch.setattr(server.served.engine, "stream", slow)
    page = open_page()
    page.locator("#examples button", has_text="Extract an event").click()
    page.get_by_role("button", name="JSON schema", exact=True).click()
    page.get_by_label("JSON schema", exact=True).fill(json.dumps(ENDLESS))
    for stop in ("Escape", "click"):
        message(page).fill("x")
        message(page).press("Enter")
        until(page, "document.querySelector('.writing .value')?.textContent.length > 40")
        assert server.served.admission.active == 1
        if stop == "click":
            page.get_by_role("button", name="Stop", exact=True).click()
        else:
            message(page).press("Escape")
        page.wait_for_selector(".note:has-text('You stopped this answer') >> nth=-1")
        until(page, "document.querySelector('.writing') === null")
        until(page, lambda: server.served.admission.active == 0)
        assert "incomplete" in page.locator(".json .note").last.inner_text()


@pytest.fixture
def thinking_server(tmp_path, monkeypatch):
    """A model that thinks: each of two parts of its answer is written once the test has opened its gate."""
    thought, said = "<think>\nHm. So. And on it goes", "\n</think>\n\nIt is fine."
    folder = write_family_folder(tmp_path / "model", "qwen3", max_position_embeddings=4096)
    with running_server(source=folder) as running:
        running.gate = threading.Semaphore(0)
        original = answer_events.logits_processors

        def processors(served, request, prompt):
            script = FollowsText(served.tokenizer, thought + said, len(prompt))
            first = len(served.tokenizer.encode(thought, add_special_tokens=False))

            def gated(tokens, logits):
                if tokens.shape[0] - len(prompt) == first:
                    assert running.gate.acquire(timeout=WAIT / 1000)
                return script(tokens, logits)

            return [gated, *original(served, request, prompt)]

        monkeypatch.setattr(answer_events, "logits_processors", processors)
        yield running


def test_a_thought_is_open_while_it_is_written_and_folds_behind_it(open_page, thinking_server):
    page = open_page(url=thinking_server.url)
    page.wait_for_selector("#model option", state="attached")
    bodies = requests_of(page)

    def ask(index):
        """Ask, and return the thought while it is written."""
        message(page).fill("How?")
        message(page).press("Enter")
        page.wait_for_selector(f".answer >> nth={index}")
        found = page.locator(".answer").nth(index).locator(".thought")
        # The last tokens before the gate are shown when the next step has run.
        until(page, lambda: "So." in found.locator("> .text").inner_text())
        return found

    thought = ask(0)
    assert thought.get_attribute("open") is not None
    assert thought.locator("summary").inner_text() == "Thinking…"
    thinking_server.gate.release()
    assert ended(page, 0) == "It is fine."
    assert thought.get_attribute("open") is None
    assert thought.locator("summary").inner_text() == "Thought"
    assert not thought.locator("> .text").is_visible()

    # What the user has opened, here by closing and opening it, stays open.
    thought = ask(1)
    for _ in range(2):
        thought.locator("summary").click()
    thinking_server.gate.release()
    assert ended(page, 1) == "It is fine."
    assert thought.get_attribute("open") is not None
    assert thought.locator("> .text").inner_text().strip() == "Hm. So. And on it goes"

    _, sent = bodies
    assert [m["role"] for m in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["messages"][1]["reasoning_content"] == "Hm. So. And on it goes"
    assert sent["messages"][1]["content"] == "It is fine."


FILES = """(files) => {
  const data = new DataTransfer();
  for (const [name, type, coded] of files) {
    const bytes = Uint8Array.from(atob(coded), (letter) => letter.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
  }
  return data;
}"""
PASTE = """(data) => {
  const options = { clipboardData: data, bubbles: true, cancelable: true };
  return document.getElementById("message").dispatchEvent(new ClipboardEvent("paste", options));
}"""


SLOW_IMAGES = """() => {
  const decode = window.createImageBitmap;
  const go = new Promise((done) => (window.finishReading = done));
  window.createImageBitmap = async (file) => {
    await go;
    window.createImageBitmap = decode;
    return decode(file);
  };
}"""


def files(page, *given):
    """A `DataTransfer` of files, each a name, a type and bytes."""
    return page.evaluate_handle(
        FILES, [[name, kind, in_base64(data)] for name, kind, data in given]
    )


def test_images_are_attached_shown_and_sent(open_page, rng):
    red, blue, noise = square(), square((0, 0, 255)), picture(rng, 2500, 200)
    assert len(noise) > 1 << 20
    with seeing_server(max_tokens=2) as seeing:
        page = open_page(url=seeing.server.url)
        page.wait_for_selector("#add-images")
        sent = requests_of(page)

        # By the button, by dragging and from the clipboard; each can be removed again.
        red_file = {"name": "a.png", "mimeType": "image/png", "buffer": red}
        with page.expect_file_chooser() as chooser:
            page.get_by_role("button", name="Add images").click()
        chooser.value.set_files([red_file, red_file])
        page.wait_for_selector("#attached img >> nth=1")
        page.get_by_role("button", name="Remove Image 2").click()
        dragged = files(page, ("b.png", "image/png", blue), ("c.txt", "text/plain", b"no image"))
        page.dispatch_event("#thread", "dragover", {"dataTransfer": dragged})
        assert "dropping" in page.locator("#composer").get_attribute("class")
        page.dispatch_event("#thread", "drop", {"dataTransfer": dragged})
        page.wait_for_selector(".toast:has-text('c.txt is not an image')")
        page.wait_for_selector("#attached img >> nth=1")
        assert not page.evaluate(PASTE, files(page, ("d.png", "image/png", noise)))  # it is taken
        page.wait_for_selector("#attached img >> nth=2")
        assert "dropping" not in page.locator("#composer").get_attribute("class")

        send(page, "Which colours?")
        assert page.locator("#attached img").count() == 0
        *images, asked = sent[-1]["messages"][-1]["content"]
        assert asked == {"type": "text", "text": "Which colours?"}
        urls = [part["image_url"]["url"] for part in images]
        assert urls[:2] == [data_uri(red), data_uri(blue)]
        assert urls[2].startswith("data:image/jpeg;base64,")  # made smaller
        assert [image.size for image in seeing.images] == [(40, 40), (40, 40), (2048, 164)]
        shown = page.locator(".user .images img")
        assert shown.evaluate_all("(all) => all.map((img) => img.naturalWidth)") == [40, 40, 2048]

        # They stay with the message: in the next request, in an edited version, and in an exported file.
        message(page).fill("And now?")
        message(page).press("Enter")
        ended(page, 1)
        assert sent[-1]["messages"][0]["content"][:3] == images
        page.get_by_role("button", name="Edit message").first.click()
        page.locator(".edit-form textarea").fill("Why?")
        page.get_by_role("button", name="Send", exact=True).click()
        ended(page, 0)
        assert sent[-1]["messages"][-1]["content"] == [*images, {"type": "text", "text": "Why?"}]
        page.get_by_role("button", name="Export", exact=True).click()
        with page.expect_download() as download:
            page.get_by_role("button", name="JSON", exact=True).click()
        exported = json.loads(download.value.path().read_text())["conversations"]
        reload(page)
        page.wait_for_selector(".user .images img >> nth=2")
        import_chats(page, *exported)
        until(page, "document.querySelectorAll('.conversation').length === 2")
        assert page.locator(".user .images img").count() == 3
        turns = exported[0]["turns"].values()
        next(turn for turn in turns if turn.get("images"))["images"] = ["https://example.com/a.png"]
        import_chats(page, *exported)
        page.wait_for_selector(".toast:has-text('must be data URIs')")

        # Images that are still being read when a message is sent are the next one's.
        page.evaluate(SLOW_IMAGES)
        page.set_input_files("#image-files", [red_file])
        send(page, "Without.")
        assert sent[-1]["messages"][-1]["content"] == "Without."
        page.evaluate("() => window.finishReading()")
        page.wait_for_selector("#attached img")
        assert page.locator(".user").last.locator("img").count() == 0
        page.get_by_role("button", name="Remove Image 1").click()

        # A message may have images alone.
        page.get_by_role("button", name="New chat").click()
        page.set_input_files("#image-files", [red_file])
        page.wait_for_selector("#attached img")
        page.locator("#send").click()
        ended(page, 0)
        assert sent[-1]["messages"] == [{"role": "user", "content": images[:1]}]
        assert page.get_by_role("heading", level=1).inner_text() == "Image"
        assert page.evaluate(CHECKS) == []


def test_models_that_read_text_only_are_given_no_images(page):
    message(page).fill("Hi")
    assert not page.locator("#add-images").is_visible()
    assert page.evaluate(
        PASTE, files(page, ("a.png", "image/png", square()))
    )  # left to the browser
    dragged = files(page, ("b.png", "image/png", square()))
    page.dispatch_event("#composer", "drop", {"dataTransfer": dragged})
    page.wait_for_timeout(100)
    assert page.locator("#attached img").count() == 0


def test_export_import_rename_search_and_delete(open_page):
    page = open_page()
    answer = send(page, FORMAL)
    page.get_by_role("button", name=re.compile("^Rename")).click()
    page.keyboard.type("My chat")
    page.keyboard.press("Enter")
    assert page.get_by_role("heading", level=1).inner_text() == "My chat"
    kept = {}
    for name in ("Markdown", "JSON"):
        page.get_by_role("button", name="Export", exact=True).click()
        with page.expect_download() as download:
            page.get_by_role("button", name=name, exact=True).click()
        kept[download.value.suggested_filename] = download.value.path().read_text()
    assert kept["my-chat.md"] == f"# My chat\n\n**You**\n\n{FORMAL}\n\n**afm-nano**\n\n{answer}\n"
    page.get_by_role("button", name="New chat").click()
    send(page, TODOS)
    page.get_by_label("Search chats").fill("film lect")
    assert page.locator(".conversation .title").all_inner_texts() == ["My chat"]
    page.locator(".conversation").focus()
    page.get_by_role("button", name="Delete My chat").focus()
    page.keyboard.press("Enter")
    assert page.locator(".conversation").count() == 0
    page.get_by_role("button", name="Undo").click()
    page.wait_for_selector("h1:has-text('My chat')")
    page.get_by_role("button", name="Delete My chat").click()
    page.get_by_label("Search chats").fill("")
    assert page.locator(".conversation").count() == 1
    import_chats(page, *json.loads(kept["my-chat.json"])["conversations"])
    page.wait_for_selector("h1:has-text('My chat')")
    assert page.locator(".answer > .text").inner_text() == answer


def test_a_second_tab_shows_what_the_first_has_written(open_page):
    page = open_page()
    with page.context.expect_page() as opening:
        page.evaluate("window.open(location.href)")
    other = opening.value
    other.wait_for_selector("html[data-ready]")
    # A background page draws, and takes clicks, once a second.
    page.bring_to_front()
    answer = send(page, FORMAL)
    other.bring_to_front()
    other.locator(".conversation").click()
    other.wait_for_selector(".answer:not(.writing)")
    assert other.locator(".answer > .text").inner_text() == answer
    page.bring_to_front()
    page.get_by_role("button", name=re.compile("^Delete")).click()
    until(other, "document.querySelector('.conversation') === null")
    other.close()


def test_the_key_and_the_theme_are_remembered(open_page, server):
    ground = "getComputedStyle(document.body).backgroundColor"
    with running_server(server.served, api_keys=("open sesame",)) as guarded:
        page = open_page(url=guarded.url, scheme="dark")
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("API key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#key-problem:has-text('rejected')")
        dialog.get_by_label("API key", exact=True).fill("open sesame")
        page.keyboard.press("Enter")
        page.wait_for_selector("#examples li")
        assert "Film Lecture" in send(page, FORMAL)
        dark = page.evaluate(ground)
        page.get_by_role("button", name="Light", exact=True).click()
        light = page.evaluate(ground)
        assert light != dark
        reload(page)
        page.wait_for_selector("#model option", state="attached")
        assert not dialog.is_visible()
        # The theme follows the system until it is chosen.
        assert page.evaluate(ground) == light
        page.get_by_role("button", name="System", exact=True).click()
        assert page.evaluate(ground) == dark
        page.emulate_media(color_scheme="light")
        assert page.evaluate(ground) == light


def test_by_keyboard_alone(open_page):
    page = open_page()
    press = page.keyboard.press

    def tab_to(name):
        for _ in range(60):
            press("Tab")
            focused = page.evaluate(
                """() => {
                  const at = document.activeElement;
                  const { outlineStyle, outlineWidth } = getComputedStyle(at.id === "message" ? at.form : at);
                  const shown = outlineStyle !== "none" && parseFloat(outlineWidth) >= 2;
                  return [at.ariaLabel ?? at.labels?.[0]?.textContent ?? at.textContent, shown];
                }"""
            )
            if page.evaluate("document.activeElement === document.body"):
                continue
            assert focused[1], f"the focus on {focused[0]!r} can't be seen"
            if name in focused[0]:
                return
        raise AssertionError(f"Tab never comes to {name!r}")

    page.evaluate("document.activeElement.blur()")
    tab_to("Skip to message field")
    press("Enter")
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("Make this formal:")
    press("Shift+Enter")
    page.keyboard.type("hey Hana, can't make it to the Film Lecture")
    press("Enter")
    assert "Film Lecture" in ended(page, 0)
    assert page.evaluate("document.activeElement.id") == "message"
    press("ArrowUp")
    assert page.evaluate("document.activeElement.value") == FORMAL
    press("Escape")
    assert page.evaluate("document.activeElement.ariaLabel") == "Edit message"
    tab_to("Regenerate")
    press("Enter")
    ended(page, 0)
    assert "2 / 2" in page.locator(".answer .pager").inner_text()
    press("Control+k")
    assert page.evaluate("document.activeElement.id") == "search"
    press("Shift+Escape")
    assert page.evaluate("document.activeElement.id") == "message"
    press("Control+.")
    tab_to("Temperature")
    press("Control+.")
    assert page.evaluate("document.activeElement.id") == "message"
    press("Control+/")
    assert page.get_by_role("dialog", name="Keyboard shortcuts").is_visible()
    press("Escape")
    press("Control+Shift+o")
    assert page.get_by_role("heading", level=1).inner_text() == "New chat"
    tab_to("Shortcuts")


# Names of controls, headings, ids, and the contrast of every text against what is behind it.
CHECKS = """() => {
  const problems = [];
  const shown = (element) => element.checkVisibility({ visibilityProperty: true });
  const describe = (element) => element.outerHTML.slice(0, 100);
  const nameOf = (element) => {
    const by = element.getAttribute("aria-labelledby");
    const labels = [...(element.labels ?? [])].map((label) => label.textContent).join("");
    const named = by ? by.split(" ").map((id) => document.getElementById(id).textContent).join("") : "";
    return (element.ariaLabel || named || labels || element.textContent || "").trim();
  };
  const fields = "button, a[href], input, select, textarea";
  const controls = `${fields}, summary, dialog, aside, nav, [role]:not([role=status], [role=alert])`;
  for (const element of document.querySelectorAll(controls)) {
    if (shown(element) && !nameOf(element)) problems.push(`no name: ${describe(element)}`);
  }
  for (const element of document.querySelectorAll(fields)) {
    const { width, height } = element.getBoundingClientRect();
    const isSmall = Math.min(width, height) < 24 && element.type !== "checkbox";
    if (shown(element) && isSmall) problems.push(`too small: ${width} x ${height} ${describe(element)}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) problems.push(`twice: ${id}`);
  for (const attribute of ["aria-controls", "aria-describedby", "aria-labelledby", "for"]) {
    for (const element of document.querySelectorAll(`[${attribute}]`)) {
      for (const id of element.getAttribute(attribute).split(" ")) {
        if (!document.getElementById(id)) problems.push(`no element ${id}`);
      }
    }
  }
  if (document.querySelectorAll("main").length !== 1) problems.push("not one main");
  if (document.querySelectorAll("h1").length !== 1) problems.push("not one h1");
  const parse = (colour) => {
    const numbers = colour.match(/[\\d.]+/g).map(Number);
    return numbers.length < 4 ? [...numbers, 1] : numbers;
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const behind = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reduceRight((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const luminance = (rgb) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = rgb.map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const untold = "noscript, .visually-hidden, option, optgroup";
  const check = (element, colour, ground, needed, what) => {
    const found = contrast(over(parse(colour), ground), ground);
    if (found < needed) problems.push(`${what} ${found.toFixed(2)}: ${describe(element)}`);
  };
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!shown(element) || element.disabled || element.closest(untold)) continue;
    if (text || element.value) check(element, getComputedStyle(element).color, behind(element), 4.5, "text");
    if (element.placeholder) {
      check(element, getComputedStyle(element, "::placeholder").color, behind(element), 4.5, "placeholder");
    }
    if (element.matches("input, textarea, select") && !element.closest("#composer")) {
      check(element, getComputedStyle(element).borderTopColor, behind(element.parentElement), 3, "edge");
    }
  }
  if (document.documentElement.scrollWidth > innerWidth) problems.push("wider than the window");
  return problems;
}"""


@pytest.mark.parametrize("size", SIZES)
def test_names_sizes_and_contrast_in_every_state(open_page, size):
    page = open_page(size)

    def check():
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert page.evaluate(CHECKS) == [], scheme

    check()
    example(page, "Track an order")
    check()
    page.get_by_label("Result of track_order").fill("{}")
    page.get_by_role("button", name="Send result").click()
    ended(page, 1)
    page.get_by_role("button", name="Edit results").click()
    page.keyboard.press("Control+Shift+o")
    example(page, "Extract an event")
    page.get_by_role("button", name="Settings", exact=True).click()
    page.get_by_label("JSON schema", exact=True).fill("{")
    check()
    page.keyboard.press("Control+.")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.keyboard.press("Control+Shift+o")
    send(page, "x")
    page.keyboard.press("Control+k")
    page.get_by_role("button", name=re.compile("^Rename")).first.click()
    page.get_by_role("button", name="Import and export").click()
    check()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Shortcuts").click()
    check()


def test_long_chats_and_long_words_fit(open_page):
    page = open_page()
    long = "w" * 500
    texts = [
        f"question {i}" if i % 2 == 0 else f"# {long}\n\n- `{long}`\n\n```\n{long}\n```"
        for i in range(200)
    ]
    import_chats(page, chat_of(long, *texts[1:]) | {"title": long})
    page.wait_for_selector(".turn >> nth=199")
    outside = """() => {
      const at = document.getElementById("scroller");
      return [document.documentElement.scrollWidth - innerWidth, at.scrollWidth - at.clientWidth,
        at.scrollHeight - at.clientHeight - at.scrollTop < 2];
    }"""
    assert page.evaluate(outside) == [0, 0, True]
    for width, height in SIZES.values():
        page.set_viewport_size({"width": width, "height": height})
        # Scrolled up, the page stays there while an answer comes; a button scrolls to the bottom.
        page.evaluate("document.getElementById('scroller').scrollTop = 0")
        page.get_by_role("button", name="Scroll to bottom").click()
        assert page.evaluate(outside) == [0, 0, True]
