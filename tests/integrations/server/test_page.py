"""The page at `/`, as a browser shows it."""

from __future__ import annotations

import shutil
from importlib.resources import files

import httpx
import pytest

from agentcache.integrations.server.auth import ApiKeys

MODEL = "tiny-hybrid"
HEAD = {"role": "system", "content": "You are one of several agents with one head. " * 12}


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("there is no Chromium")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser):
    """A page on which no script may fail."""
    opened = browser.new_page(viewport={"width": 1100, "height": 1000})
    faults: list[str] = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    yield opened
    opened.close()
    assert not faults


def converse(url: str, id: str, *texts: str, headers: dict[str, str] | None = None) -> None:
    messages: list[dict] = [HEAD]
    for text in texts:
        messages.append({"role": "user", "content": text})
        body = {"model": MODEL, "messages": messages, "max_tokens": 8, "session_id": id}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60)
        messages.append(answer.json()["choices"][0]["message"])


def test_it_shows_tree_sessions_and_why_a_turn_missed(served_here, page):
    served_here.runtime.clear()
    converse(served_here.url, "alpha", "Look at the first file.", "And at the second one.")
    converse(served_here.url, "beta", "Run the tests, then report.")
    converse(served_here.url, "<b>bold</b>", "Do nothing.")
    page.goto(served_here.url)
    page.wait_for_selector(".turn")

    assert page.text_content("#model") == MODEL
    assert page.locator(".session h3").all_text_contents() == ["<b>bold</b>", "beta", "alpha"]
    assert page.locator(".turn").count() == 4
    assert page.locator("#tree .node.shared").count() >= 1
    assert page.locator("#tree .dot").count() >= 4
    names = page.locator("#tree .name").all_text_contents()
    assert {"alpha", "beta", "<b>bold</b>"} <= set(names)
    assert "checkpoints" in page.text_content("#legend")

    page.locator(".session").nth(1).locator(".turn").first.click()
    told = page.text_content("#miss")
    assert told.startswith("beta, turn 1: ")
    assert "prompt tokens cached" in told
    assert "token" in told.partition("\n")[2]


def test_all_that_several_paths_go_through_is_shared(served_here):
    served_here.runtime.clear()
    for id in ("one", "two", "three"):
        converse(served_here.url, id, "Look at the first file.", f"{id}: and at the next one.")
    nodes = httpx.get(f"{served_here.url}/state").json()["tree"]["nodes"]
    ends = {node["end"]: node["shared"] for node in nodes if node["end"]}
    branch = max(end for end, is_shared in ends.items() if is_shared)
    assert sum(end <= branch for end in ends) > 1, "a checkpoint divides what they share"
    assert all(is_shared == (end <= branch) for end, is_shared in ends.items())


def test_it_goes_on_without_being_loaded_again(served_here, page):
    page.goto(served_here.url)
    page.wait_for_selector("#content:not([hidden])")
    converse(served_here.url, "late", "Hello")

    page.locator(".session h3", has_text="late").wait_for()


def test_where_there_are_keys_it_asks_for_the_admins(start, page):
    with start(keys=ApiKeys.parse(["k=team"], admin="root")) as server:
        converse(server.url, "secret", "Hello", headers={"Authorization": "Bearer k"})
        page.goto(server.url)
        page.wait_for_selector("#unlock:not([hidden])")
        page.fill("#key", "k")
        page.click("#unlock button")
        page.get_by_text("that key does not open this page").wait_for()
        assert page.locator(".session").count() == 0
        page.fill("#key", "root")
        page.click("#unlock button")
        page.wait_for_selector(".session")

        assert page.text_content(".session h3") == "secret"
        assert "tenant team" in page.text_content(".session p")


def test_it_needs_nothing_from_elsewhere_and_allows_nothing(served_here):
    answer = served_here.get("/")
    policy = answer.headers["Content-Security-Policy"]

    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for name in ("index.html", "page.css", "page.js"):
        text = files("agentcache.integrations.server").joinpath("assets", name).read_text()
        assert "http://" not in text
        assert "https://" not in text
        assert served_here.get(f"/assets/{name}").text == text
    assert served_here.get("/assets/page.py").status_code == 404
    assert served_here.get("/assets/..%2fpage.py").status_code == 404


def test_its_state_is_for_those_who_see_all_tenants(start):
    with start(keys=ApiKeys.parse(["k"], admin="root")) as server:
        assert server.get("/").status_code == 200
        assert server.get("/state").status_code == 401
        assert server.get("/state", headers={"x-api-key": "k"}).status_code == 403
        assert server.get("/state", headers={"x-api-key": "root"}).status_code == 200


def test_nodes_of_the_tree_hang_together(served_here):
    converse(served_here.url, "one", "First")
    converse(served_here.url, "two", "Second")
    tree = served_here.get("/state").json()["tree"]
    nodes = {node["id"]: node for node in tree["nodes"]}

    for node in nodes.values():
        if node["parent"] is not None:
            assert nodes[node["parent"]]["end"] == node["start"] < node["end"]
    standing = [name for node in nodes.values() for name in node["sessions"]]
    assert {"one", "two"} <= set(standing)
