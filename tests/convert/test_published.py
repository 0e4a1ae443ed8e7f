"""Released models: their config.json is understood, and a model of stock transformers comes in."""

import pytest

from megasink.convert.hf_config import architecture_from
from megasink.errors import UserError
from tests.convert.published import REFUSED, RELEASED, respelled
from tests.distributed.layout import SINGLE


@pytest.mark.parametrize("spelled", [dict, respelled])
@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_gives_the_architecture(name, spelled):
    config, expected = RELEASED[name]
    architecture, target = architecture_from(spelled(config))
    assert target.name == config["model_type"]
    assert {field: getattr(architecture, field) for field in expected} == expected


@pytest.mark.parametrize("spelled", [dict, respelled])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_come_in_is_refused_by_name(name, spelled):
    config, words = REFUSED[name]
    if "without RoPE" in name and spelled is respelled:
        pytest.skip("the new keys say which RoPE")
    with pytest.raises(UserError) as caught:
        architecture_from(spelled(config))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", RELEASED)
def test_a_model_that_transformers_saved_comes_in(pool, tmp_path, name):
    """With the keys of config.json as released; the logits are those of stock transformers."""
    (report,) = pool.run(
        "tests.convert.accuracy_tasks:import_released",
        SINGLE,
        folder=str(tmp_path),
        config=RELEASED[name][0],
    )
    assert 0 < report["logits"] <= report["tolerance"]
    assert report["largest"] > 1
    assert report["argmax"] == report["generated"] == 1
