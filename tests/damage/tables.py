"""Every damaged input, by name."""

from tests.damage import checkpoints, corpora, data_sets, fields, folders, fuzz, going_on

_TABLES = {
    "corpus": corpora.CASES,
    "data": data_sets.CASES,
    "run": checkpoints.CASES,
    "folder": folders.CASES,
    "field": fields.CASES,
    "going-on": going_on.CASES,
    "fuzz": fuzz.CASES,
}
CASES = {f"{kind}/{name}": case for kind, table in _TABLES.items() for name, case in table.items()}
