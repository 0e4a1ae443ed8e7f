"""Hide warnings of other packages that users of megasink cannot act on.

``PYTHONWARNINGS=default`` shows them. Ranks of a run hide none: their output goes to RUN/logs.
"""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Hide warnings, and log records below ERROR, unless the user has asked Python for warnings."""
    if sys.warnoptions:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
