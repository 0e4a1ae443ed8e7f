"""What the command does around the ranks that it steps (tests/plan/hollow/test_plan.py)."""

import json
import re
from argparse import Namespace

import pytest

from megasink.errors import ConfigError
from megasink.plan import hollow, plan_tables, rank_step, run_plan, whole_job
from megasink.plan.stand_in_flags import with_stand_ins
from megasink.plan.whole_job import DEVICES
from megasink.training.checks.host_memory import CHECKPOINT_BYTES
from tests.documented import calls, with_files
from tests.parsing import read, refuse
from tests.training.command_lines import MOCK

FACTS = {"pipeline": 4, "virtual": 1, "microbatches": 8}


def modules(*mixtures):
    """Stages of one layer each."""
    last = len(mixtures) - 1
    return [[[[bool(m)]], s == 0, s == last] for s, m in enumerate(mixtures)]


@pytest.mark.parametrize(
    ("stages", "microbatches", "virtual", "wanted"),
    [
        (modules(0), 1, 1, [0]),
        (modules(0, 0, 0, 0), 8, 1, [0, 1, 2, 3]),
        (modules(*[0] * 8), 8, 1, [0, 1, 6, 7]),
        (modules(*[0] * 8), 7, 1, list(range(8))),  # the pipeline is never full
        (modules(*[0] * 8), 8, 2, list(range(8))),
        (modules(*[0] * 8), 16, 2, [0, 1, 6, 7]),
        (modules(0, 0, 0, 1, 1, 1, 1, 1), 8, 1, [0, 1, 2, 3, 6, 7]),
    ],
)
def test_which_stages_tell_all(stages, microbatches, virtual, wanted):
    facts = {"pipeline": len(stages), "microbatches": microbatches, "virtual": virtual}
    assert whole_job.stages_to_step(facts | {"stages": stages}) == wanted


@pytest.mark.parametrize("before_data", [False, True])
def test_the_first_rank_of_a_stage(before_data):
    facts = {"ranks": 64, "pipeline": 4, "tensor": 2, "context": 2, "of_stage": 16}
    facts["pipeline_before_data"] = before_data
    wanted = [0, 4, 8, 12] if before_data else [0, 16, 32, 48]
    assert [whole_job.rank_of(stage, facts, last=False) for stage in range(4)] == wanted
    assert whole_job.rank_of(3, facts, last=True) == 63


def test_blocks_of_the_stages_of_a_pattern():
    args = Namespace(
        hybrid_layer_pattern="*-*|-|*-|M*-",
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        attention_variant_layers=[1, 1, 0, 1, 1],
        num_layers=5,
    )
    assert rank_step.stages(args) == {
        "stages": [
            [[["*-*", [True, True]], ["*-", [False]]], True, False],
            [[["-", [True]], ["M*-", [True, True]]], False, True],
        ],
        "blocks": [[1, 2, 3], [2, 4, 5]],  # block 2 is in both
    }


def test_what_grows_by_microbatch_is_multiplied():
    def step(microbatches, **calls):
        row = {"group": "TP", "ranks": 2, "purpose": "Megatron"}
        return {
            "microbatches": microbatches,
            "calls": [
                {**row, "kind": kind, "calls": n, "messages": 10 * n, "sent": 5 * n}
                for kind, n in calls.items()
            ],
        }

    record = {"job": {"microbatches": 32}, "steps": [step(4, a=1, b=8), step(8, a=1, b=12)]}
    found = {what[2]: sums["calls"] for what, sums in whole_job.step_traffic(record).items()}
    assert found == {"a": 1, "b": 8 + 28}
    record = {"job": {"microbatches": 2}, "steps": [step(2, a=3), step(2, a=3)]}
    assert [sums["messages"] for sums in whole_job.step_traffic(record).values()] == [30]


def test_problems_of_its_own_flags_are_told_before_anything_starts(monkeypatch):
    monkeypatch.setattr(run_plan, "Helper", None)
    words = ["--ranks", "0", "--utilization", "2", "--resume", "--device", "cpu", *MOCK]
    with pytest.raises(ConfigError) as error:
        run_plan.main(words)
    assert len(error.value.problems) == 4


def test_a_recipe_stands_for_its_flags():
    data = "--mock-data --tokenizer-type NullTokenizer --vocab-size 65536".split()
    _, flags = run_plan.read_line(["--recipe", "p0-2b", *data])
    with pytest.raises(ConfigError) as error:
        refuse(flags, 3)
    assert all("256" in problem for problem in error.value.problems)
    refuse(flags, 8)


def test_the_lines_of_the_docs_are_accepted(tmp_path):
    lines = [call.words for call in calls() if call.words[:1] == ["plan"]]
    for suffix in ("bin", "idx"):
        (tmp_path / f"text.{suffix}").write_bytes(b"")
    names = {"/data/corpus": f"{tmp_path}/text", "/data/corpus-tokenizer": str(tmp_path)}
    assert lines
    for _, *words in lines:
        words = with_files(words, tmp_path, names)
        args, flags = run_plan.read_line(words)
        refuse(with_stand_ins(words, flags), args.ranks)


def test_help_tells_of_every_flag(capsys):
    with pytest.raises(SystemExit):
        run_plan.main(["--help"])
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--ranks", "--gpu", "--utilization", "--json"))


def test_the_command(capsys, monkeypatch):
    """From the line to the tables, with a helper process of its own."""
    if reason := hollow.missing():
        pytest.skip(reason)
    monkeypatch.setenv("COLUMNS", "100")
    flags = [*MOCK, "--bf16", "--head-balance-coeff", "1e-3", "--disable-bias-linear"]
    stepped = []
    step = run_plan._step
    monkeypatch.setattr(
        run_plan, "_step", lambda *a, **k: stepped or stepped.extend(step(*a, **k)) or stepped
    )
    line = ["--ranks", "8", *flags, "--global-batch-size", "64"]
    assert run_plan.main([*line, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["job"]["microbatches"] == 4
    assert plan["tokens_per_step"] == 64 * 64
    (stage,) = plan["stages"]
    parts = [p for p in stage["memory"] if p not in ("peak", "reserved")]
    assert sum(stage["memory"][part] for part in parts) == stage["memory"]["peak"]
    assert plan["checkpoint_host_bytes"] == 0  # nothing to gather
    sharded = [r | {"job": r["job"] | {"gathers": True}} for r in stepped]
    taken = plan_tables.as_json(sharded, DEVICES["h100"], 0.4)["checkpoint_host_bytes"]
    assert taken == CHECKPOINT_BYTES * stage["parameters"]
    plan_tables.show(sharded, "h100", 0.4)
    assert "GiB of host memory per rank" in " ".join(capsys.readouterr().out.split())

    assert run_plan.main(line) == 0
    text = capsys.readouterr().out
    assert all(len(row) <= 100 for row in text.splitlines()), text
    total = sum(plan["parameters"].values())
    for shown in (f"{total:,}", "fits in 80 GiB", "head-balance loss", "CoreAttention"):
        assert shown in text


SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64 --lr 1e-3".split()
SIZES += "--max-position-embeddings 64 --micro-batch-size 1 --train-iters 1".split()


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ([*SIZES, "--vocab-size", "1000"], 1000),
        (["--recipe", "p0-2b"], 65_536),
        (["--recipe", "p1-1.7b-28l", "p1-long-32k"], 151_936),
        (["--recipe", "p2-1b", "--vocab-size", "32000"], 32_000),
    ],
)
def test_a_plan_needs_neither_data_nor_a_tokenizer(monkeypatch, capsys, line, tokens):
    taken = []
    monkeypatch.setattr(run_plan, "Helper", lambda _, flags: taken.extend(flags) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_plan.main(["--ranks", "8", *line])
    args = read(taken)
    assert args.mock_data
    assert args.tokenizer_type == "NullTokenizer"
    assert args.vocab_size == tokens
    said = capsys.readouterr().err
    assert "no data" in said
    taken.clear()
    assert f"a vocabulary of {tokens:,} tokens" in said
    with pytest.raises(ZeroDivisionError):
        run_plan.main(["--ranks", "8", *line, "--data-path", "0.5", "nowhere"])
    assert read(taken).mock_data
    assert "nowhere was not found" in capsys.readouterr().err


def test_all_problems_are_one_message_and_a_plan_may_have_a_vocabulary():
    if reason := hollow.missing():
        pytest.skip(reason)
    wrong = ["--num-attention-heads", "5", "--lr", "-1", "--tensor-model-parallel-size", "2"]
    with pytest.raises(ConfigError) as error:
        run_plan.main(["--ranks", "3", *SIZES, *wrong])
    text = "\n".join(error.value.problems)
    assert len(error.value.problems) >= 4
    assert re.search(r"--tokenizer-model FOLDER .*, or --vocab-size N for a p", text)
    assert "3 ranks are not divisible by" in text


def test_what_a_step_frees_first_is_not_above_its_fullest_moment():
    steps = [{"peak": p, "before": 100, "start": 60, "held": 30} for p in (95, 120)]
    steps = [step | {"in_flight": 1, "each": 30, "reserved": 130} for step in steps]
    for step, working in zip(steps, (5, 30), strict=True):
        record = {"steps": [step], "training_state": {"parameters": 40}, "stage": 0, "rank": 0}
        record |= {"layers": [], "parameters_here": {}}
        memory = whole_job.stage_of(record).memory
        parts = {"parameters": 40, "buffers": 20, "activations": 30, "working": working}
        assert parts.items() <= memory.items()
        assert sum(parts.values()) == memory["peak"]
