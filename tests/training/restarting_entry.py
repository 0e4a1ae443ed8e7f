"""``megasink.training`` as a rank of torchrun; of the first attempt rank 1 dies in step 5."""

import os
import sys

from megasink.cpu.prepare_process import prepare_process
from megasink.training.pretrain import main
from tests.training.dying_entry import train

if __name__ == "__main__":
    prepare_process()
    dies = (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("0", "1")
    sys.exit(train("step:5") if dies else main(sys.argv[1:]))
