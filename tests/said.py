"""What a call says that is refused."""

from collections.abc import Callable
from typing import Any

from megasink.errors import UserError


def said(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The message with which a call refuses; "" where it does not."""
    try:
        call(*arguments, **options)
    except (UserError, ValueError, NotImplementedError) as error:
        return str(error)
    return ""
