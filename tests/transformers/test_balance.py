"""The head-balance loss of models of transformers, in a loop without a Trainer."""

import pytest
import torch

import megasink.transformers  # noqa: F401  registers the attention
from megasink.errors import UserError
from megasink.transformers.balance_loss import HeadBalanceLoss
from tests.analysis.capture.tiny_models import tiny_model
from tests.balance import definition
from tests.transformers import balance_oracle
from tests.transformers.balance_oracle import (
    Oracle,
    take_gradients,
    tokens,
    without_grouped_experts,
)

COEFF = 0.5
# Vanilla, sinks with windows, explicit gates: per head and per element, with layers without
# softmax attention, and megasink's own modeling file.
NAMES = ["llama", "gpt-oss", "granite-swa", "qwen3.5", "lfm3", "own-sink", "own-gated"]


def model_of(name, dtype=torch.float64, implementation="megasink", **options):
    return without_grouped_experts(tiny_model(name, implementation, **options)).to(dtype).train()


def step(model, batches, scale=0.5, **given):
    """Forward and backward of microbatches; the gradients."""
    for batch in batches:
        (scale * model(input_ids=batch, labels=batch, **given).loss).backward()
    return take_gradients(model)


def assert_gradients(found, expected, without, tolerance=1e-6):
    """Equal within a part of the largest entry; and not what they are without the loss."""
    assert found.keys() == expected.keys()
    changed = 0
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        error = float((found[name] - gradient).abs().max())
        assert error <= tolerance * scale + 1e-12, (name, error, scale)
        changed += float((without[name] - gradient).abs().max()) > 1e-3 * scale
    assert changed > 3


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_step_equal_plain_autograd(name):
    """Eq. 8 in the scope global: the loss of the union of two microbatches, one step behind."""
    first, second = (tokens(1), tokens(2)), (tokens(3), tokens(4))
    model = model_of(name)
    balance = HeadBalanceLoss(model, COEFF, shared_heads=1)
    step(model, first)
    balance.finish_step()
    found = step(model, second)
    last = balance.finish_step()

    oracle = Oracle(name)
    parts = []
    for batch in first:
        oracle.model(input_ids=batch)
        parts.append(oracle.importance().detach())
    before_LH = torch.stack(parts).mean(0)
    routed = definition.routed_heads(before_LH, 1)
    c_LH = balance_oracle.coefficients(before_LH, COEFF, routed)
    without = step(oracle.model, second)
    parts = []
    for batch in second:
        loss = oracle.model(input_ids=batch, labels=batch).loss
        parts.append(oracle.importance())
        (0.5 * (loss + (c_LH * parts[-1]).sum())).backward()
    # Linear attention computes in float32, whatever the model's dtype.
    tolerance = 1e-5 if name == "qwen3.5" else 1e-6
    assert_gradients(found, oracle.gradients(), without, tolerance)

    importance_LH = torch.stack(parts).mean(0).detach()
    known_L = ~last.importance_LH.isnan().any(1)
    found_LH = last.importance_LH[known_L].double()
    torch.testing.assert_close(found_LH, importance_LH, rtol=1e-6, atol=1e-7)
    expected = definition.balance_loss(importance_LH, COEFF, routed)
    assert float(last.balance_loss) == pytest.approx(float(expected), rel=1e-5)
    assert int(known_L.sum()) == len(balance.layers) == len(importance_LH)


def test_the_first_step_has_no_balance_gradient():
    model, plain = model_of("llama"), model_of("llama")
    balance = HeadBalanceLoss(model, 100.0)
    found, expected = step(model, [tokens(1)]), step(plain, [tokens(1)])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
    balance.finish_step()
    key = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(step(model, [tokens(1)])[key], expected[key], rtol=1e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_reads_the_padding_of_its_own_forward_pass(reentrant):
    """Two forward passes before one backward pass; each computes its layers again."""
    model = model_of("llama")
    masks = [torch.ones_like(tokens(1)) for _ in range(2)]
    masks[0][0, 7:] = masks[1][1, 4:] = 0
    found = []
    for together in (False, True):
        balance = HeadBalanceLoss(model, COEFF, scope="microbatch")
        losses = []
        for batch, mask in zip((tokens(1), tokens(2)), masks, strict=True):
            loss = model(input_ids=batch, labels=batch, attention_mask=mask).loss
            losses.append(loss) if together else loss.backward()
        if together:
            sum(losses).backward()
        importance_LH = balance.finish_step().importance_LH.clone()
        balance.remove()
        found.append(take_gradients(model) | {"importance": importance_LH})
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("scope", ["microbatch", "data-parallel"])
def test_scopes_without_lag(scope):
    """One process alone: the mean over microbatches of the loss of each."""
    batches = tokens(3), tokens(4)
    model = model_of("gpt-oss")
    balance = HeadBalanceLoss(model, COEFF, scope=scope)
    found = step(model, batches)
    last = balance.finish_step()
    oracle = Oracle("gpt-oss")
    without, total = step(oracle.model, batches), 0.0
    for batch in batches:
        loss = oracle.model(input_ids=batch, labels=batch).loss
        every = [list(range(oracle.heads))] * 2
        added = definition.balance_loss(oracle.importance(), COEFF, every)
        (0.5 * (loss + added)).backward()
        total += 0.5 * float(added.detach())
    assert_gradients(found, oracle.gradients(), without)
    assert float(last.balance_loss) == pytest.approx(total, rel=1e-5)


def test_microbatches_count_by_their_targets_as_in_the_loss():
    """A sum over targets, divided by those of the step (Trainer's num_items_in_batch)."""
    batches = tokens(3), tokens(4)
    labels = [batch.clone() for batch in batches]
    labels[0][:, :9] = -100
    labels[1][:, :2] = -100
    counts = [2 * 3, 2 * 10]
    model = model_of("llama")
    balance = HeadBalanceLoss(model, COEFF)
    step(model, batches)
    balance.finish_step()
    for batch, answer in zip(batches, labels, strict=True):
        model(input_ids=batch, labels=answer, num_items_in_batch=torch.tensor(26)).loss.backward()
    found = take_gradients(model)

    oracle = Oracle("llama")
    parts = []
    for batch in batches:
        oracle.model(input_ids=batch)
        parts.append(oracle.importance().detach())
    every = [list(range(oracle.heads))] * 2
    c_LH = balance_oracle.coefficients(torch.stack(parts).mean(0), COEFF, every)
    results = []
    for weight in (0.0, 1.0):
        for batch, answer, count in zip(batches, labels, counts, strict=True):
            loss = oracle.model(input_ids=batch, labels=answer).loss  # a mean
            (count / 26 * (loss + weight * (c_LH * oracle.importance()).sum())).backward()
        results.append(oracle.gradients())
    assert_gradients(found, results[1], results[0])


def test_padding_is_not_counted():
    batch = tokens(3)
    real_BT = torch.ones_like(batch)
    real_BT[1, 7:] = 0
    labels = batch.where(real_BT.bool(), -100)
    model = model_of("llama")
    balance = HeadBalanceLoss(model, COEFF, scope="microbatch")
    model(input_ids=batch, attention_mask=real_BT, labels=labels).loss.backward()
    last, found = balance.finish_step(), take_gradients(model)
    oracle, every = Oracle("llama"), [list(range(4))] * 2
    results = []
    for coeff in (0.0, COEFF):
        loss = oracle.model(input_ids=batch, labels=labels).loss
        importance_LH = oracle.importance(real_BT.bool())
        (loss + definition.balance_loss(importance_LH, coeff, every)).backward()
        results.append(oracle.gradients())
    assert_gradients(found, results[1], results[0])
    torch.testing.assert_close(last.importance_LH.double(), importance_LH, rtol=1e-6, atol=1e-7)

    # The same rows, padded on the left.
    shifted, mask = batch.clone(), real_BT.clone()
    shifted[1], mask[1] = batch[1].roll(5), real_BT[1].roll(5)
    answer = shifted.where(mask.bool(), -100)
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    model(input_ids=shifted, labels=answer, **given).loss.backward()
    left = balance.finish_step()
    torch.testing.assert_close(left.importance_LH, last.importance_LH, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["llama", "qwen3.5"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_counts_once(name, reentrant):
    batches = tokens(3), tokens(4)
    results = []
    for checkpointing in (False, True):
        model = model_of(name, torch.float32)
        balance = HeadBalanceLoss(model, COEFF, shared_heads=1)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        step(model, batches)
        balance.finish_step()
        results.append((step(model, batches), balance.finish_step()))
    (plain, last), (again, later) = results
    tolerance = 1e-5 if reentrant else 0.0  # its first forward pass has no gradients, so no gates
    for key, value in plain.items():
        assert float((again[key] - value).abs().max()) <= tolerance * float(value.abs().max()), key
    same = {"rtol": tolerance, "atol": 0.0, "equal_nan": True}
    torch.testing.assert_close(later.importance_LH, last.importance_LH, **same)
    torch.testing.assert_close(later.balance_loss, last.balance_loss, **same)
    assert last.balance_loss > 0


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3.5"])
def test_bfloat16(name):
    """Its gates are recorded in float32, and its gradient is that of float32 up to rounding."""
    batches = tokens(3, length=24), tokens(4, length=24)
    added, importance = [], []
    for dtype in (torch.float32, torch.bfloat16):
        pair = []
        for coeff in (0.0, 20.0):
            model = model_of(name, dtype)
            balance = HeadBalanceLoss(model, coeff)
            for _ in range(2):
                gradients = step(model, batches)
                last = balance.finish_step()
            pair.append(gradients)
        assert last.importance_LH.dtype is torch.float32
        importance.append(last.importance_LH)
        key = next(n for n in pair[0] if n.endswith(("sinks", "self_attn.q_proj.weight")))
        added.append((pair[1][key].float() - pair[0][key].float()).flatten())
    torch.testing.assert_close(*importance, rtol=0, atol=2e-2, equal_nan=True)
    assert float(torch.nn.functional.cosine_similarity(*added, dim=0)) > 0.95


def test_evaluation_and_generation_are_not_counted():
    model = model_of("llama", torch.float32)
    balance = HeadBalanceLoss(model, COEFF)
    step(model, [tokens(3)])
    alone = balance.finish_step().importance_LH
    step(model, [tokens(3)])
    with torch.no_grad():
        model(input_ids=tokens(5), labels=tokens(5))
    model.eval()
    model(input_ids=tokens(6), labels=tokens(6)).loss.backward()
    model.generate(tokens(6), max_new_tokens=2)
    assert torch.equal(balance.finish_step().importance_LH, alone)


def test_a_state_continues_bit_for_bit():
    batches = [tokens(seed) for seed in (1, 2, 3)]
    whole = model_of("gpt-oss", torch.float32)
    balance = HeadBalanceLoss(whole, COEFF, shared_heads=1, refresh=2)
    for batch in batches[:2]:
        step(whole, [batch])
        balance.finish_step()
    resumed = model_of("gpt-oss", torch.float32)
    other = HeadBalanceLoss(resumed, COEFF, shared_heads=1, refresh=2)
    other.load_state_dict(balance.state_dict())
    found, expected = step(resumed, batches[2:]), step(whole, batches[2:])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    other.finish_step(), balance.finish_step()
    for name, value in balance.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert balance.state_dict()["steps"].tolist() == [[3], [3]]
    small = HeadBalanceLoss(model_of("llama", num_hidden_layers=1), COEFF)
    with pytest.raises(UserError, match=r"shape \[2, 4\], but this model needs \[1, 4\]"):
        small.load_state_dict(balance.state_dict())


def test_remove_leaves_the_model_as_it_was():
    model = model_of("llama", torch.float32)
    names, modules = set(model.state_dict()), set(dict(model.named_modules()))
    before = step(model, [tokens(3)])
    for _ in range(2):
        balance = HeadBalanceLoss(model, COEFF, scope="microbatch")
        assert set(model.state_dict()) == names
        with_loss = step(model, [tokens(3)])
        balance.remove()
    after = step(model, [tokens(3)])
    assert set(dict(model.named_modules())) == modules
    assert not any(hasattr(module, "megasink_heads") for module in model.modules())
    key = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(before[key], after[key])
    assert not torch.equal(before[key], with_loss[key])
