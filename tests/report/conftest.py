from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.report.chromium import Page, open_page


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_page(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    yield browser
    assert not browser.errors
    browser.errors.clear()
