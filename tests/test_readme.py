"""The snippets of the README and of docs/operator.md run as they stand, each in its own process."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

from conftest import ROOT

SNIPPETS = [
    snippet
    for page in ("README.md", "docs/operator.md")
    for snippet in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
]


def test_the_readme_has_snippets() -> None:
    assert len(SNIPPETS) >= 3


@pytest.mark.npu
@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet(snippet: str, run_script: RunScript) -> None:
    # A snippet that activates the simulator itself has to find a process without it.
    run_script(snippet, runtime=None if "simulator.activate(" in snippet else "sim")


def test_every_page_that_is_linked_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#:]+\.md)\)", page.read_text()):
            assert (page.parent / link).is_file(), f"{page.name} links {link}"
