"""The chat page of a server with several models."""

import re

import pytest
from playwright.sync_api import expect

from pronk.checkpoint.hub.clone_models import tiny_model
from server.browsing import CHROMIUM, SharedPage, Visits, ask
from server.serving import running_pool
from server.test_model_pool import loader_of, make_pool

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="expected Chromium, found none; set $CHROMIUM"),
]


def test_the_model_is_chosen_on_the_page(shared_page: SharedPage) -> None:
    pool = make_pool({"one": tiny_model(), "two": tiny_model()}, "one two")
    pool.preload(pool.find("one"))
    with running_pool(pool) as (url, _, _), Visits(shared_page, url) as visit:
        page = visit()
        choice = page.get_by_role("combobox", name="Model").first
        expect(choice).to_have_value("one")
        expect(page.locator("#model")).to_contain_text("context 2,048 · recycling")
        expect(choice.locator("option")).to_have_text(["one", "two (unloaded)"])
        choice.focus()
        choice.select_option("two")
        expect(page).to_have_title(re.compile("^two"))
        expect(choice).to_be_focused()
        ask(page)
        assert page.locator(".answer .text").inner_text()
        assert len(loader_of(pool, "two").loads) == 1
        expect(choice.locator("option")).to_have_text(["one", "two"])
        expect(page.locator("#model")).to_contain_text("context 2,048 · recycling")
    pool.finish()


def test_a_page_of_one_model_shows_its_name_without_a_choice(shared_page: SharedPage) -> None:
    pool = make_pool({"one": tiny_model()}, "one")
    pool.preload(pool.find("one"))
    with running_pool(pool) as (url, _, _), Visits(shared_page, url) as visit:
        page = visit()
        expect(page.locator("#model b")).to_have_text("one")
        expect(page.locator("#model select")).to_have_count(0)
    pool.finish()
