"""A pytest fixture for precision locks; nothing is loaded unless a conftest.py asks for it.

In the conftest.py at the root of the tests:

```python
pytest_plugins = ["jaxmp.pytest_plugin"]
```

and in a test, where ``make_step`` is your own:

```python
def test_precision(precision_lock):
    step, args = make_step()
    precision_lock(step, "train_step.lock")(*args)
```

``pytest --update-precision-locks`` writes the files next to the tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from jaxmp.testing import assert_precision_locked

__all__ = ["precision_lock"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that writes locks."""
    parser.addoption(
        "--update-precision-locks",
        action="store_true",
        help="write the files of the fixture precision_lock, in place of comparing with them",
    )


@pytest.fixture
def precision_lock(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Returns `jaxmp.testing.assert_precision_locked`, for files in the folder of the test's file.

    Returns:
      A function of a function, the name of a file, and a policy or none; its result takes the
      arguments of the function, and raises `jaxmp.testing.PrecisionError`.
    """
    update = bool(request.config.getoption("--update-precision-locks"))

    @functools.wraps(assert_precision_locked)
    def locked(fn: Callable[..., Any], path: str, policy: Any = None) -> Callable[..., None]:
        file = request.path.parent / path
        return assert_precision_locked(fn, file, policy, update=update)

    return locked
