"""Each call that `make sanitize` looks at, without the sanitizer: it runs, by our kernels, and its results are finite."""

from __future__ import annotations

import pytest
import sanitizer_calls

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ours_alone")]


@pytest.mark.parametrize("name", [name for name, (family, _) in sanitizer_calls.CALLS.items() if family == "any"])
def test_sanitizer_call(name):
    assert sanitizer_calls.run(name)
