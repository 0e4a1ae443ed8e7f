"""Released configurations: imported with transformers' logits and exported again, or refused."""

import pytest

from megasink.convert.hf_config import architecture_from
from megasink.errors import UserError
from tests.convert import models_page
from tests.convert.collection import IMPORTED, REFUSED, SIZES, config_of
from tests.convert.models import FAMILIES, MODELS
from tests.distributed.layout import SINGLE

LATER = pytest.mark.later


def _cases():
    """The first configuration of each target that test_round_trip.py leaves to this test."""
    known = {target for name, (target, _) in MODELS.items() if name not in FAMILIES}
    for name, (kind, _) in IMPORTED.items():
        yield pytest.param(name, marks=[LATER] if kind in known else [])
        known.add(kind)


@pytest.mark.parametrize("name", _cases())
def test_a_released_model_comes_in_and_goes_out(pool, tmp_path, name):
    kind, keys = IMPORTED[name]
    config = config_of(kind, keys)
    where = {"folder": str(tmp_path), "config": config}
    (report,) = pool.run("tests.convert.accuracy_tasks:import_and_export", SINGLE, **where)
    assert 0 < report["logits"] <= report["tolerance"]
    assert report["largest"] > 0.5
    assert report["argmax"] == report["generated"] == 1
    assert report["target"] == kind
    # These store norms minus one, which rounds them.
    minus_one = ("nemotron", "qwen3_next", "qwen3_5_text")
    rounded = "norm" if kind in minus_one else "no weight"
    assert [name for name in report["differ"] if rounded not in name] == []


# Their logits differ from those of transformers by more than 1e-5.
APART = [name for name, did in models_page.recorded().items() if did["logits"] > 1e-5]


@pytest.mark.parametrize("name", [APART[0], *(pytest.param(n, marks=LATER) for n in APART[1:])])
def test_both_sides_round_equally(pool, tmp_path, name):
    where = {"folder": str(tmp_path), "config": config_of(*IMPORTED[name])}
    (errors,) = pool.run("tests.convert.accuracy_tasks:errors", SINGLE, **where)
    assert 0 < errors["ours"] < 1.5 * errors["theirs"] < 1e-5


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(name):
    kind, keys, said = REFUSED[name]
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_hidden_layers", "head_dim")}
    with pytest.raises(UserError, match=said):
        architecture_from(config_of(kind, keys, sizes))


def test_the_page_of_models_has_what_was_run():
    assert len(IMPORTED) + len(REFUSED) == 41
    assert models_page.PAGE.read_text() == models_page.page(models_page.recorded())


def test_every_model_of_the_collection_was_run():
    assert models_page.recorded().keys() == IMPORTED.keys()
