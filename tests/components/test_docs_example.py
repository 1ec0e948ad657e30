"""The worked example of docs/components.md: a layer kind in one component, and what it prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

PAGE = Path(__file__).parents[2] / "docs" / "components.md"


def test_new_layer_kind_of_the_documentation_works_as_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.S))
    printed = re.search(r"prints\n\n```\n(.*?)```", text, re.S)
    assert printed is not None
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == printed[1]
