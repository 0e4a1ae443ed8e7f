"""Options and flags, as dataclasses and as argparse's."""
