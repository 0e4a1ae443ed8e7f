"""A command of megasink in a forked process, with the hub and the cache that its environment names.

Before the fork the package has read those of the session.
"""

import os
import sys
from pathlib import Path

from huggingface_hub import constants

from megasink.__main__ import run
from tests.forkserver import HANG_SECONDS

if __name__ == "__main__":
    home = Path(os.environ["HF_HOME"])
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
    constants.ENDPOINT = os.environ["HF_ENDPOINT"]
    constants.HUGGINGFACE_CO_URL_TEMPLATE = constants.ENDPOINT + template
    constants.HF_HUB_CACHE, constants.HF_TOKEN_PATH = str(home / "hub"), str(home / "token")
    constants.HF_HUB_ETAG_TIMEOUT = constants.HF_HUB_DOWNLOAD_TIMEOUT = int(HANG_SECONDS)
    sys.argv[0] = "megasink"
    sys.exit(run())
