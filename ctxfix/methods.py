# SPDX-License-Identifier: Apache-2.0
"""Calling what stands in a class under a method's name, with the instance as its first argument."""

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any


def unbound(found: Any) -> Callable[..., Any]:
    """``found``, an entry of a class's ``__dict__``, to be called as ``function(self, …)``.

    A plain function is that already. What others put in its place (wrapt's FunctionWrapper, a partialmethod) learns of
    its instance only by being bound to it; called as it is, wrapt tells the wrapper that there is none.
    """
    if type(found) is FunctionType or not hasattr(type(found), "__get__"):
        return found  # type: ignore[no-any-return]

    @wraps(found)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return found.__get__(self, type(self))(*args, **kwargs)

    return call
