"""From data files through the trainer's own forward step: the same in every layout."""

import json
import math
import re
import shutil
import textwrap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megasink.data.corpus import Corpus
from megasink.data.hf_tokenizer import load_tokenizer, train_tokenizer
from megasink.data.preprocess import preprocess
from tests.distributed import merging
from tests.distributed.cases import TOLERANCE
from tests.distributed.layout import SINGLE, Layout
from tests.distributed.pool import Pool
from tests.llama_like import llama_like
from tests.runs import short_documents

TASKS = "tests.distributed.data_tasks"
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 "
    "--lr 1e-3 --normalization RMSNorm --swiglu --disable-bias-linear --split 1,0,0 "
    "--no-check-for-nan-in-loss-and-grad --init-method-std 0.2 --head-balance-scope microbatch"
).split()
ROPE = ["--position-embedding-type", "rope"]
DOCUMENTS = ["--dataloader-inter-document-masking"]
LAYOUTS = {
    Layout(pp=2): ["--pipeline-model-parallel-size", "2"],
    Layout(tp=2, sp=True): ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    # Each rank has a virtual stage in the middle, which reads nothing but boundaries.
    Layout(pp=2, vpp=2): [
        *["--pipeline-model-parallel-size", "2"],
        *["--num-layers-per-virtual-pipeline-stage", "1"],
    ],
}


@pytest.fixture(scope="module")
def pool():
    """Workers of its own: a run with a tokenizer leaves state that others must not meet."""
    with Pool(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return short_documents(tmp_path_factory.mktemp("documents"))


CP = ["--context-parallel-size", "2"]
A2A = [*CP, "--cp-comm-type", "a2a"]
# Under this seed the microbatches have different numbers of targets.
SEED = ["--seed", "6"]
EOD = [*SEED, "--eod-mask-loss"]
PER_TOKEN = [*EOD, "--calculate-per-token-loss"]
YARN = [
    *["--position-embedding-type", "yarn", "--rotary-scaling-factor", "4"],
    *["--yarn-original-max-position-embeddings", "32"],
]
REPLACED = ["--replace-tokens-at", "0", "3", "--replace-tokens-with", "random"]
CASES = [
    (Layout(cp=2), EOD, CP),
    (Layout(cp=2), PER_TOKEN, A2A),
    (Layout(cp=2), ["--sink-token"], CP),
    (Layout(cp=2), ["--prefix-lm-tokens", "10"], A2A),
    (Layout(cp=2), [*DOCUMENTS, *EOD], CP),
    (Layout(cp=2), [*DOCUMENTS, *PER_TOKEN], A2A),
    (Layout(cp=2), [*DOCUMENTS, *YARN], CP),
    (Layout(pp=2), [*DOCUMENTS, *REPLACED], ["--pipeline-model-parallel-size", "2"]),
    *(
        (layout, kind, flags)
        for layout, flags in LAYOUTS.items()
        for kind in (PER_TOKEN, DOCUMENTS)
    ),
]


@pytest.fixture(scope="module")
def whole(pool, text):
    """Loss and gradients of one process, by the flags of the loss and the mask."""
    task, start = f"{TASKS}:one_step", [*MODEL, *text, *ROPE]
    return lambda *flags: pool.once(task, SINGLE, argv=[*start, *flags])


@pytest.mark.parametrize(
    ("layout", "kind", "flags"),
    CASES,
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_every_rank_has_its_tokens_and_every_stage_its_documents_and_targets(
    pool, text, whole, layout, kind, flags
):
    argv = [*MODEL, *text, *ROPE, *kind, *flags]
    reports, wanted = pool.run(f"{TASKS}:one_step", layout, argv=argv), whole(*kind)
    assert merging.loss(reports) == pytest.approx(merging.loss(wanted), rel=TOLERANCE)
    merging.assert_same_gradients(reports, wanted, TOLERANCE)
    # Of Megatron's count of operations: the tokens, and the squared lengths of documents.
    assert {report["lengths"] for report in reports} == {wanted[0]["lengths"]}


def test_masked_targets_matter(whole):
    gradients = [merging.whole([r["gradients"] for r in whole(*f)]) for f in (SEED, EOD, PER_TOKEN)]
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    for one, other in pairwise(gradients):
        assert merging.relative_error(one[name], other[name]) > 1e-3


@pytest.mark.parametrize(
    "mask",
    [[], DOCUMENTS, [*DOCUMENTS, *REPLACED]],
    ids=["one", "documents", "replaced"],
)
def test_evaluation_adds_up_over_context_parallel_ranks(pool, text, mask):
    argv = [*MODEL, *text, *ROPE, *EOD, *mask]
    (wanted,) = pool.run(f"{TASKS}:evaluation", SINGLE, argv=argv)
    found = pool.run(f"{TASKS}:evaluation", Layout(cp=2), argv=[*argv, *CP])
    for name in ("lm loss", "bits"):
        total = found[0][name] + found[1][name]
        assert total == pytest.approx(wanted[name], rel=TOLERANCE)
        assert 0 < found[0][name][1] < wanted[name][1]


def test_without_the_flag_the_documents_see_each_other(whole):
    assert abs(merging.loss(whole())[0] - merging.loss(whole(*DOCUMENTS))[0]) > 1e-3


@pytest.mark.parametrize("reset", [[], ["--reset-position-ids"]], ids=["plain", "reset"])
def test_documents_end_with_their_token_and_start_at_position_0(pool, text, reset):
    argv = [*MODEL, *text, *ROPE, *DOCUMENTS, *reset]
    (found,) = pool.run(f"{TASKS}:boundaries", SINGLE, argv=argv)
    assert len(found["last"]) > 2
    assert set(found["last"]) == {found["eod"]}
    assert found["restart"] is True


def test_a_prefix_counts_in_neither_loss_nor_bits_per_byte(pool, text):
    """P2.18: of 64 targets with a prefix of 10 tokens, the 10th to the 64th count."""
    argv = [*MODEL, *text, *ROPE, "--prefix-lm-tokens", "10"]
    (found,) = pool.run(f"{TASKS}:evaluation", SINGLE, argv=argv)
    assert found["lm loss"][1] == 2 * 55
    sizes = found["bytes"][found["labels"][:, 9:]]
    assert found["bits"][1] == sizes.sum()
    # Special tokens are no bytes; their nats are in the loss alone.
    assert 0.5 < found["bits"][0] * math.log(2) / found["lm loss"][0] <= 1.0


@pytest.fixture(scope="module", params=[None, "<|bos|>"], ids=["plain", "bos"])
def with_spaces(request, tmp_path_factory):
    """Data of short texts whose tokenizer puts a space before each, as Llama 2's."""
    folder = tmp_path_factory.mktemp("spaces")
    lines = Path(textwrap.__file__).read_text().splitlines()
    records = [json.dumps({"text": line.strip()}) + "\n" for line in lines if line.strip()]
    (folder / "a.jsonl").write_text("".join(records))
    corpus = Corpus([folder / "a.jsonl"])
    train_tokenizer(corpus, 400, folder / "trained", bos=True)
    made = llama_like(load_tokenizer(folder / "trained"), bos=request.param)
    made.save_pretrained(folder / "llama")
    preprocess(corpus, folder / "text", folder / "llama", workers=1)
    argv = ["--data-path", str(folder / "text"), "--tokenizer-model", str(folder / "llama")]
    return made, argv


SPACES = [
    (SINGLE, []),
    (SINGLE, ["--sink-token"]),
    (SINGLE, [*DOCUMENTS]),
    (Layout(cp=2), CP),
    (Layout(pp=2), ["--pipeline-model-parallel-size", "2"]),
    (Layout(tp=2), ["--tensor-model-parallel-size", "2"]),
]


@pytest.mark.parametrize(("layout", "flags"), SPACES, ids=lambda x: str(x))
def test_a_space_that_the_tokenizer_puts_before_texts_is_no_byte(pool, with_spaces, layout, flags):
    """Of each document that begins among the targets: decoding removes that space."""
    tokenizer, data = with_spaces
    argv = [*MODEL, *ROPE, *SEED, *flags, *data]
    found = [
        one for one in pool.run(f"{TASKS}:evaluation", layout, argv=argv) if one["bits"] is not None
    ]
    (read,) = pool.run(f"{TASKS}:evaluation", SINGLE, argv=[*MODEL, *ROPE, *SEED, *data])
    special = set(tokenizer.all_special_ids)
    expected = begun = 0
    for tokens, labels in zip(read["tokens"].tolist(), read["labels"].tolist(), strict=True):
        text, inside = [], tokens[0] not in special
        if "--sink-token" in flags:  # which shifts: the first target is masked, the last dropped
            labels = labels[:-1]
        for label in [*labels, tokenizer.eos_token_id]:
            if label not in special:
                text.append(label)
                continue
            pieces = "".join(tokenizer.convert_ids_to_tokens(text))
            size = len(re.sub(r"<0x..>", "x", pieces).replace("\u2581", " ").encode())
            begun += bool(text) and not inside
            expected += size - (bool(text) and not inside)
            text, inside = [], False
    assert begun > 4
    counted = {Layout(cp=2): 2}.get(layout, 1)
    assert sum(one["bits"][1] for one in found[-counted:]) == expected


@pytest.fixture(scope="module")
def samples(pool, text):
    """Samples of one epoch and of several: of the text, with random tokens, with one token."""
    task, argv = f"{TASKS}:samples", [*MODEL, *text, *ROPE]
    fixed = ["--replace-tokens-at", "2", "--replace-tokens-with", "7"]
    kinds = {"text": [], "random": REPLACED, "fixed": fixed}
    kinds |= {f"{name}, documents": [*flags, *DOCUMENTS] for name, flags in kinds.items()}
    return {
        name: pool.run(task, SINGLE, argv=[*argv, *flags], counts=[20, 300])[0]
        for name, flags in kinds.items()
    }


@pytest.mark.parametrize("mask", ["", ", documents"])
def test_replaced_tokens_are_inputs_and_targets(samples, mask):
    """P2.15, P2.16: the other tokens are those of the text, and a target is the next input."""
    for kind, positions in (("random", [0, 3]), ("fixed", [2])):
        for found, text in zip(samples[kind + mask], samples["text" + mask], strict=True):
            size = text["tokens"].shape[1]
            for row in range(len(text["tokens"])):
                bounds = [0, size]
                if mask:
                    bounds = sorted(set(text["cu_seqlens"][row].tolist()))
                there = [a + p for a, b in pairwise(bounds) for p in positions if p < b - a]
                tokens, before = found["tokens"][row], text["tokens"][row]
                kept = [i for i in range(size) if i not in there]
                assert (tokens[kept] == before[kept]).all()
                if kind == "fixed":
                    assert (tokens[there] == 7).all()
                assert (found["labels"][row, :-1] == tokens[1:]).all()
    random, text = samples["random" + mask][1], samples["text" + mask][1]
    share = (random["tokens"] != text["tokens"]).mean()
    assert share > 0.015  # of 64 tokens, two or more


@pytest.mark.parametrize("mask", ["", ", documents"])
def test_random_tokens_are_those_of_the_place_in_every_epoch(samples, mask):
    """One draw for each place in the data, whatever the number of epochs and the order."""
    drawn = {}
    for found in samples["random" + mask]:
        for begin, tokens in zip(found["begins"], found["tokens"].tolist(), strict=True):
            drawn.setdefault(begin, []).append((tokens[0], tokens[3]))
    again = [pairs for pairs in drawn.values() if len(pairs) > 1]
    assert len(again) >= (5 if mask else 3)
    if not mask:  # a document of fewer than four tokens ends before the fourth
        assert all(len(set(pairs)) == 1 for pairs in again)
    assert all(len({first for first, _ in pairs}) == 1 for pairs in again)
    assert len({pairs[0] for pairs in drawn.values()}) > 20


def test_replaced_targets_are_no_bytes(pool, text, samples):
    """They count in the loss; bits per byte are of the text alone (P0.18)."""
    flags = ["--replace-tokens-at", "5", "9", "--replace-tokens-with", "random"]
    argv = [*MODEL, *text, *ROPE, *flags]
    (found,) = pool.run(f"{TASKS}:evaluation", SINGLE, argv=argv)
    assert found["lm loss"][1] == 2 * 64
    sizes = found["bytes"][found["labels"]]
    sizes[:, [4, 8]] = 0
    assert found["bits"][1] == sizes.sum()
    documents = [*MODEL, *text, *ROPE, *DOCUMENTS, *REPLACED]
    (found,) = pool.run(f"{TASKS}:evaluation", SINGLE, argv=documents)
    text_bytes = found["bytes"][found["labels"]].sum()
    assert 0.5 * text_bytes < found["bits"][1] < text_bytes


@pytest.mark.parametrize("mask", [[], DOCUMENTS], ids=["one", "documents"])
def test_every_token_of_text_counts_whatever_the_padding_is(pool, tmp_path, mask):
    """The same ids, with a padding of its own and with BOS, which begins every document."""
    lines = Path(textwrap.__file__).read_text().splitlines()
    records = "".join(json.dumps({"text": line}) + "\n" for line in lines if line.strip())
    (tmp_path / "a.jsonl").write_text(records)
    corpus, own, other = Corpus([tmp_path / "a.jsonl"]), tmp_path / "own", tmp_path / "other"
    train_tokenizer(corpus, 400, own, bos=True)
    preprocess(corpus, tmp_path / "text", own, workers=1)
    shutil.copytree(own, other)
    config = json.loads((own / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<|bos|>"}))
    data = ["--data-path", str(tmp_path / "text")]
    found = []
    for folder in (own, other):
        argv = [*MODEL, *ROPE, *SEED, *mask, "--tokenizer-model", str(folder)]
        step = pool.run(f"{TASKS}:one_step", SINGLE, argv=[*argv, *data])
        (sums,) = pool.run(f"{TASKS}:evaluation", SINGLE, argv=[*argv, *data])
        (samples,) = pool.run(f"{TASKS}:samples", SINGLE, argv=[*argv, *data], counts=[40])
        del argv[argv.index("--split") : argv.index("--split") + 2]
        (mock,) = pool.run(f"{TASKS}:samples", SINGLE, argv=[*argv, "--mock-data"], counts=[8])
        found.append((merging.loss(step), sums, samples[0], mock[0]))
    (loss, sums, *kinds), (other_loss, other_sums, *other_kinds) = found
    assert loss == other_loss
    for name in ("lm loss", "bits"):
        assert sums[name].tolist() == other_sums[name].tolist()
    for one, two in zip(kinds, other_kinds, strict=True):
        assert one["loss_mask"].all()
        for key in ("tokens", "labels", "loss_mask"):
            np.testing.assert_array_equal(one[key], two[key])
        assert (one["labels"] == 3).sum() > 10  # BOS
        assert mask or (one["labels"] == 2).any() == (one is kinds[1])  # padding, made up
