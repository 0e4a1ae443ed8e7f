"""Which runs YaRN can stretch."""

import pytest

from megasink.checkpoints.load import with_yarn
from megasink.cli.analysis_flags import weights_parser, weights_problems
from megasink.errors import UserError

RUN = {"position_embedding_type": "rope", "seq_length": 64, "max_position_embeddings": 64}


def test_the_context_is_stretched_from_the_length_of_training():
    made = with_yarn(RUN | {"rotary_base": 500_000}, 4.0)
    assert made == {
        "position_embedding_type": "yarn",
        "rotary_base": 500_000,
        "seq_length": 64,
        "max_position_embeddings": 256,
        "rotary_scaling_factor": 4.0,
        "yarn_original_max_position_embeddings": 64,
    }
    # Rotary embeddings have no table: a run may name more positions than it was trained at.
    assert (
        with_yarn(RUN | {"max_position_embeddings": 1024}, 2.0)["max_position_embeddings"] == 1024
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"position_embedding_type": "learned_absolute"}, "has --position-embedding-type learned"),
        ({"position_embedding_type": "yarn"}, "has --position-embedding-type yarn"),
        ({"use_rope_scaling": True}, "has --use-rope-scaling"),
    ],
)
def test_a_run_without_plain_rotary_embeddings_is_refused(other, message):
    with pytest.raises(UserError, match=f"--yarn 4: the run {message}"):
        with_yarn(RUN | other, 4.0)


def test_a_hugging_face_model_has_its_own_setting(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    words = [str(tmp_path), "--output", str(tmp_path / "out"), "--device", "cpu", "--yarn", "4"]
    args = weights_parser("megasink evaluate", None).parse_args(words)
    (problem,) = weights_problems(args, is_run=False)
    assert "--yarn applies to runs only" in problem
