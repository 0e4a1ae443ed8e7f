"""Every wrong command line gets its own sentence, all of them in one message, before step 1."""

import heapq
import json
import os
import tempfile
import textwrap
from argparse import Namespace
from pathlib import Path

import pytest

from megasink.data.corpus import Corpus
from megasink.data.hf_tokenizer import train_tokenizer
from megasink.data.preprocess import preprocess
from megasink.training.checks import data_contents, transformer_impl
from tests.documented import train_lines
from tests.forkserver import server
from tests.parsing import refuse
from tests.training.command_lines import ACCEPTED, MOCK, MODEL, REFUSED


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A data set and two tokenizers: its own, and one with other tokens."""
    folder = tmp_path_factory.mktemp("data")
    for name, module in (("a", textwrap), ("b", heapq)):
        (folder / f"{name}.txt").write_text(Path(module.__file__).read_text())
    for name in "ab":
        train_tokenizer(Corpus([str(folder / f"{name}.txt")]), 400, folder / f"tokenizer-{name}")
    corpus = Corpus([str(folder / "a.txt")])
    preprocess(corpus, folder / "text", folder / "tokenizer-a", workers=1)
    lines = (json.dumps({"text": f"text {i}"}) for i in range(2000))
    (folder / "many.jsonl").write_text("\n".join(lines))
    many = Corpus([str(folder / "many.jsonl")])
    preprocess(many, folder / "many", folder / "tokenizer-a", workers=1)
    return folder


@pytest.fixture(scope="module")
def answers(files):
    """Every command line above through one process."""
    own = ["--data-path", str(files / "text"), "--tokenizer-model"]
    refused = {name: flags for name, (flags, _) in REFUSED.items()}
    refused["wrong-tokenizer"] = [*MODEL, *own, str(files / "tokenizer-b")]
    refused["small-embedding"] = [*MODEL, *own, str(files / "tokenizer-a")]
    refused["small-embedding"] += ["--padded-vocab-size", "128"]
    for name in ("wrong-tokenizer", "small-embedding"):
        refused[name] += ["--split", "1,0,0"]
    refused["empty-part"] = [*MODEL, *own, str(files / "tokenizer-a")]
    broken = ["--data-path", str(files / "broken"), "--tokenizer-model", str(files / "tokenizer-a")]
    (files / "broken.bin").write_bytes(b"")
    (files / "broken.idx").write_bytes((files / "text.idx").read_bytes()[:20])
    refused["broken-index"] = [*MODEL, *broken]
    text = [*MODEL, *own, str(files / "tokenizer-a"), "--split", "1,0,0"]
    accepted = ACCEPTED | {"text": text}
    documented = train_lines(files / "many", files / "tokenizer-a")
    for place, (flags, _) in documented.items():
        if "--load" in flags:  # no checkpoint is there
            at = flags.index("--load")
            del flags[at : at + 2]
        accepted[place] = flags
    refused["unsupported"] = [*MOCK, *UNSUPPORTED]
    cases = {**refused, **accepted}
    with tempfile.TemporaryFile("w+") as lines:
        json.dump(list(cases.values()), lines)
        lines.seek(0)
        # Megatron reads the world size from the environment.
        ranks = os.environ | {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}
        result = server().run(["tests.training.parse_worker"], env=ranks, stdin=lines)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.startswith("["), result.stdout[:500]
    *told, shown = json.loads(result.stdout)
    return {**dict(zip(cases, told, strict=True)), "": shown}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_every_reason(answers, name):
    problems = answers[name].get("problems", [])
    text = "\n".join(problems)
    for phrase in REFUSED[name][1]:
        assert phrase in text
    assert all("\n" not in problem for problem in problems)


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted_passes_early(name):
    refuse(ACCEPTED[name], 4)


def test_the_help_of_every_flag_is_shown(answers):
    """One of Megatron's texts holds a bare %."""
    shown = answers[""]["help"]
    hidden = [name for name in answers[""]["flags"] if name not in shown]
    assert hidden == ["--cuda-graph-scope"]  # suppressed by Megatron: an old name
    for flag in ("--moe-paged-stash-buffer-size-factor-cuda", "--num-layers", "--log-sink-rate"):
        assert flag in shown


def test_many_problems_are_one_message(answers):
    assert len(answers["everything"]["problems"]) == 5


def test_a_data_set_of_another_tokenizer_is_refused(answers):
    (problem,) = answers["wrong-tokenizer"]["problems"]
    assert "tokenizer-a" in problem
    assert "whose tokens differ from those of" in problem


def test_a_vocabulary_larger_than_the_embedding_is_refused(answers):
    (problem,) = answers["small-embedding"]["problems"]
    assert "has 400 tokens, but the embedding has only 128 rows" in problem


def test_a_part_of_the_split_without_a_document_is_refused(answers):
    """Megatron would count its epochs for ever."""
    (problem,) = answers["empty-part"]["problems"]
    assert "--split 969,30,1 (Megatron's default) leaves none of the" in problem
    assert "for validation and test: give a larger share" in problem
    assert problem.endswith("and 0 to the others, such as --split 1,0,0")


@pytest.mark.parametrize(
    ("documents", "split"), [(1, "1,0,0"), (2, "70,30,0"), (3, "80,20,0"), (12, "95,5,0")]
)
def test_the_split_that_is_proposed_gives_both_parts_a_document(documents, split):
    proposed = data_contents._split_that_fits(documents)
    assert proposed == split
    train, valid, test = (int(part) for part in proposed.split(","))
    assert round(train / (train + valid) * documents) in range(1, documents + (valid == 0))
    assert test == 0


def test_a_broken_index_is_refused(answers):
    (problem,) = answers["broken-index"]["problems"]
    assert "broken.idx is cut short: it has 20 bytes" in problem


@pytest.mark.parametrize("name", [*ACCEPTED, "text"])
def test_accepted(answers, name):
    assert "problems" not in answers[name]


def test_the_lines_of_the_documentation_are_accepted(answers):
    places = [name for name in answers if ".md:" in name]
    assert len(places) >= 9
    wrong = {place: answers[place]["problems"] for place in places if "problems" in answers[place]}
    assert wrong == {}


def test_defaults_of_the_cpu_platform(answers):
    args = answers["tp1"]["args"]
    assert args["distributed_backend"] == "gloo"
    assert args["transformer_impl"] == "local"
    assert args["use_cpu_initialization"] is True


def test_defaults_of_every_platform(answers):
    args = answers["tp1"]["args"]
    assert args["attention_dropout"] == args["hidden_dropout"] == 0.0
    assert args["dist_ckpt_optim_fully_reshardable"] is None  # chosen by size
    assert args["exit_signal_handler"] is True
    assert args["attention_variant"] == "sink"
    assert args["head_balance_coeff"] == 1e-4


def test_the_size_of_gated_units_is_megatrons(answers):
    sizes = {n: answers[n]["args"]["ffn_hidden_size"] for n in ("tp1", "swiglu", "reglu", "relu")}
    assert sizes == {"tp1": 128, "swiglu": 128, "reglu": 128, "relu": 256}


def test_layers_with_a_window_are_known_by_their_numbers(answers):
    assert answers["sinks-in-windows"]["args"]["attention_variant_layers"] == [1, 0]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ({}, []),
        ({"bf16": False}, ["add --bf16"]),
        ({"transformer_impl": "local"}, ["TransformerEngine's"]),
    ],
)
def test_fp8_is_for_the_linear_layers_of_transformer_engine(monkeypatch, flags, wanted):
    """Where it is installed; here it is not."""
    given = {"fp8": "hybrid", "bf16": True, "transformer_impl": None}
    given |= {"fp16": False, "fp32_residual_connection": False, "attention_variant": "sink"}
    args = Namespace(**given | flags)
    assert any("TransformerEngine's" in text for text in transformer_impl.problems(args))
    monkeypatch.setattr(transformer_impl, "have_transformer_engine", lambda: True)
    found = list(transformer_impl.problems(args))
    assert len(found) == len(wanted)
    assert all(phrase in text for phrase, text in zip(wanted, found, strict=True))


# Each refused by name: what is left of an option would otherwise be ignored in silence.
UNSUPPORTED = """
--apply-residual-connection-post-layernorm
--fp8-format=hybrid --fp4-format=e2m1 --use-kitchen-attention --batch-invariant-mode
--use-torch-fsdp2 --use-megatron-fsdp --tensor-parallel-num-weight-shards=2
--expert-tensor-parallel-num-weight-shards=2 --data-parallel-random-init
--cuda-graph-impl=local --enable-cuda-graph --external-cuda-graph --optimizer-cuda-graph
--cpu-offloading-num-layers=1 --fine-grained-activation-offloading --moe-paged-stash
--overlap-moe-expert-parallel-comm --moe-use-upcycling --moe-latent-size=8
--moe-single-grouped-weight --moe-single-grouped-bias --logits-save-dir=x --logits-load-dir=x
--perform-rl-step --freeze-all-layers --cache-mla-latents --mla-down-proj-fusion
--full-validation --multiple-validation-sets
--mtp-hybrid-override-pattern=M --experimental-attention-variant=dsa --qk-clip
--log-max-attention-logit
--enable-ft-package --inprocess-restart
--sft --sft-tokenizer-prompt-format=default --chat-template=x
--dataloader-type=cyclic --per-dataset-sequences-path=x
--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap
""".split()


def test_what_is_not_supported_is_refused_by_name(answers):
    problems = answers["unsupported"]["problems"]
    for flag in UNSUPPORTED:
        name = flag.split("=")[0]
        assert any(problem.startswith(f"{name}: ") for problem in problems), name


def test_the_ffn_is_narrower_by_what_the_gate_adds(answers):
    # 512 * 513 parameters of the gate, 3 * 512 + 2 for a column of SwiGLU: exactly 1365.2.
    assert answers["matched"]["args"]["ffn_hidden_size"] == 1408


def test_the_rows_of_the_embedding_do_not_depend_on_the_layout(answers):
    rows = [answers[name]["args"]["padded_vocab_size"] for name in ("tp2", "tp1-same-vocabulary")]
    assert rows == [384, 384]
    assert answers["text"]["args"]["padded_vocab_size"] == 512


def test_the_sink_token_is_one_past_the_tokenizer(answers):
    args = answers["sink-token"]["args"]
    # 383 tokens and the end of document fill three times 128 rows; the sink opens the fourth.
    assert (args["sink_token_id"], args["padded_vocab_size"]) == (384, 512)
    assert answers["tp1"]["args"]["sink_token_id"] is None
