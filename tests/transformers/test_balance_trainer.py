"""The head-balance loss in transformers' Trainer and TRL's SFTTrainer."""

import csv
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import TrainerCallback

import megasink.transformers  # noqa: F401  registers the attention
from megasink.errors import ConfigError, UserError
from megasink.transformers.trainer_callback import HeadBalanceCallback
from tests.analysis.capture.tiny_models import REAL_TEXTS, save_with_tokenizer, tiny_model
from tests.balance import definition
from tests.distributed.layout import Layout
from tests.distributed.pool import free_port
from tests.transformers import balance_oracle, balance_runs
from tests.transformers.balance_oracle import Oracle, without_grouped_experts
from tests.transformers.balance_runs import COEFF, RATE, dataset, trainer_of, weights

ROWS = 10  # five microbatches of two: steps of two, two and one


def model_of(name, dtype=torch.float64, **options):
    return without_grouped_experts(tiny_model(name, "megasink", **options)).to(dtype).train()


def by_hand(name, data, *, by_targets, coeff=COEFF):
    """Three steps of gradient descent by plain autograd; the weights, and Eq. 7 of each step."""
    oracle, losses, c_LH = Oracle(name), [], 0.0
    batches = [data[i : i + 2] for i in range(0, len(data), 2)]
    every = [list(range(oracle.heads))] * 2
    for step in (batches[:2], batches[2:4], batches[4:]):
        counts = [sum(int((row["labels"][1:] != -100).sum()) for row in batch) for batch in step]
        importance = []
        for batch, count in zip(step, counts, strict=True):
            given = {key: torch.stack([row[key] for row in batch]) for key in batch[0]}
            loss = oracle.model(**given).loss  # the mean over its targets
            importance.append(oracle.importance())
            weight = count / sum(counts) if by_targets else 1 / len(step)
            (weight * (loss + (c_LH * importance[-1]).sum())).backward()
        mean_LH = torch.stack(importance).mean(0).detach()
        losses.append(float(definition.balance_loss(mean_LH, coeff, every)))
        c_LH = balance_oracle.coefficients(mean_LH, coeff, every)
        with torch.no_grad():
            for parameter in oracle.model.parameters():
                parameter -= RATE * parameter.grad
        oracle.model.zero_grad()
    return weights(oracle.model), losses


def assert_weights(found, expected, without, tolerance=5e-5):
    """Equal within a part of what the loss changes: its coefficients are float32."""
    for name, value in expected.items():
        change = float((without[name] - value).abs().max())
        error = float((torch.as_tensor(found[name]) - value).abs().max())
        assert error <= tolerance * change + 1e-9, (name, error, change)
    key = "model.layers.0.self_attn.q_proj.weight"
    assert float((without[key] - expected[key]).abs().max()) > 1e-4


@pytest.mark.parametrize("by_targets", [True, False])
def test_trainer_equals_plain_autograd(tmp_path, by_targets):
    """Steps of two and one microbatch, whose answers have different lengths.

    Trainer divides a model's loss by the targets of the step, or by the microbatches of the step if
    the model does not take their number.
    """
    data, model, callback = dataset(ROWS, masked=True), model_of("gpt-oss"), balance_runs.callback()
    trainer = trainer_of(tmp_path, model, [callback], data)
    assert trainer.model_accepts_loss_kwargs
    trainer.model_accepts_loss_kwargs = by_targets
    trainer.train()
    expected, losses = by_hand("gpt-oss", data, by_targets=by_targets)
    without, _ = by_hand("gpt-oss", data, by_targets=by_targets, coeff=0.0)
    assert_weights(weights(model), expected, without)
    logged = [log["balance_loss"] for log in trainer.state.log_history if "loss" in log]
    assert logged == pytest.approx(losses, rel=1e-5)


def test_two_ranks_equal_one(pool, tmp_path):
    """Four microbatches per step, of one row each: on one rank, and two on each of two."""
    data, model, callback = dataset(8, masked=True), model_of("llama"), balance_runs.callback()
    sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    trainer = trainer_of(tmp_path, model, [callback], data, **sizes)
    start = weights(model)
    trainer.train()
    losses = [log["balance_loss"] for log in trainer.state.log_history if "loss" in log]
    task, layout = "tests.transformers.balance_tasks:trained_on_ranks", Layout(dp=2)
    first, second = pool.run(task, layout, name="llama", rows=8, port=free_port())
    assert first["wrapped"] == "DistributedDataParallel"
    assert first["losses"] == second["losses"] == pytest.approx(losses, rel=1e-6)
    assert_weights(first["weights"], weights(model), start, tolerance=1e-2)
    for name, value in first["weights"].items():
        assert (value == second["weights"][name]).all(), name


class Logger(TrainerCallback):
    """What a reporting integration sees, at its place in front of a Trainer's callbacks."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_logs_and_files(tmp_path):
    """Of a hybrid model, whose first layers have no softmax attention."""
    logger, callback = Logger(), balance_runs.callback(shared_heads=1)
    model = model_of("qwen3.5", torch.float32)
    trainer = trainer_of(tmp_path, model, [logger], dataset(8, masked=False))
    assert callback.add_to(trainer) is callback
    trainer.train()
    steps = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["step"] for log in steps] == [1, 2]
    assert [log for log in logger.seen if "loss" in log] == [
        {key: value for key, value in log.items() if key != "step"} for log in steps
    ]
    # Eq. 8 shares no heads, and has no loss, before the first step has chosen them.
    assert steps[0]["balance_loss"] == 0 < steps[1]["balance_loss"]
    importance_LH = callback.importance_LH
    assert importance_LH.isnan().all(1).tolist() == [True, True, True, False]
    values_H = importance_LH[3]
    assert steps[1]["head_importance"] == pytest.approx(float(values_H.mean()), rel=1e-6)
    spread = float(values_H.std(correction=0) / values_H.mean())
    assert steps[1]["head_imbalance"] == pytest.approx(spread, rel=1e-5)
    with (tmp_path / "head_importance.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["layer"], row["head"]) for row in rows] == [("3", str(h)) for h in range(4)]
    assert [float(row["importance"]) for row in rows] == pytest.approx(values_H.tolist())
    assert sum(int(row["shared"]) for row in rows) == 1
    assert (tmp_path / "head_importance.png").read_bytes().startswith(b"\x89PNG")
    assert callback.balance is None
    assert not hasattr(model, "megasink_balanced")


def test_a_resumed_run_is_bit_identical(tmp_path):
    """With Trainer's own restoring of callbacks and without."""
    data = dataset(16, masked=True)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2}
    whole = model_of("gpt-oss", torch.float32)
    shared = {"shared_heads": 1, "refresh": 2}
    trainer = trainer_of(tmp_path, whole, [balance_runs.callback(**shared)], data, **options)
    trainer.train()
    expected = weights(whole)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 4
    options["save_strategy"] = "no"
    checkpoint = tmp_path / "checkpoint-3"
    for restores in (False, True):
        options["restore_callback_states_from_checkpoint"] = restores
        resumed = model_of("gpt-oss", torch.float32)
        again = trainer_of(tmp_path, resumed, [balance_runs.callback(**shared)], data, **options)
        again.train(resume_from_checkpoint=str(checkpoint))
        for name, value in weights(resumed).items():
            assert torch.equal(value, expected[name]), name
        assert [log for log in again.state.log_history if "loss" in log] == logs

    path = checkpoint / "trainer_state.json"
    state = json.loads(path.read_text())
    saved = state["stateful_callbacks"]["HeadBalanceCallback"]["attributes"]["saved"]
    saved["coefficients"]["base64"] = "AAAA"
    path.write_text(json.dumps(state))
    other = trainer_of(tmp_path, resumed, [balance_runs.callback(**shared)], data, **options)
    with pytest.raises(UserError, match="state of the head-balance loss is damaged"):
        other.train(resume_from_checkpoint=str(checkpoint))


def test_a_compiled_model_trains_the_same(tmp_path):
    """Trainer's torch.compile, whose graphs break at the loss."""
    found = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        torch.compiler.reset()
        model = model_of("llama", num_hidden_layers=1)
        data = dataset(8, masked=True)
        trainer = trainer_of(tmp_path, model, [balance_runs.callback()], data, **options)
        trainer.train()
        compiled = type(trainer.model_wrapped).__name__ == "OptimizedModule"
        assert compiled == bool(options)
        found.append((weights(model), trainer.state.log_history[1]["balance_loss"]))
    torch.compiler.reset()
    (expected, loss), (own, own_loss) = found
    assert own_loss == loss > 0
    for name, value in expected.items():
        torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-12)


def test_a_second_training_starts_from_nothing(tmp_path):
    """Also after one that was interrupted, whose loss is still attached."""
    model, callback = model_of("llama", torch.float32), balance_runs.callback()
    trainer = trainer_of(tmp_path, model, [callback], dataset(8, masked=False))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    first = [log["balance_loss"] for log in trainer.state.log_history if "loss" in log]
    callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=model)
    model.load_state_dict(start)
    trainer.train()
    assert [log["balance_loss"] for log in trainer.state.log_history if "loss" in log] == first


def test_bad_input_stops_before_the_first_step(tmp_path):
    data, callback = dataset(8, masked=False), HeadBalanceCallback(shared_heads=4)
    trainer = trainer_of(tmp_path, model_of("llama", torch.float32), [callback], data)
    with pytest.raises(ConfigError, match="shared_heads 4 of 4 heads"):
        trainer.train()
    assert trainer.state.global_step == 0
    args = SimpleNamespace(n_gpu=2)
    with pytest.raises(UserError, match="DataParallel, which Trainer uses for 2 GPUs in one"):
        HeadBalanceCallback().on_train_begin(args, None, None)
    sharded = SimpleNamespace(hf_ds_config=HfDeepSpeedConfig({"zero_optimization": {"stage": 3}}))
    args = SimpleNamespace(n_gpu=1, deepspeed_plugin=sharded)
    with pytest.raises(UserError, match="not tested with stage 3 of DeepSpeed"):
        HeadBalanceCallback().on_train_begin(args, None, None)
    args = SimpleNamespace(n_gpu=1, parallelism_config=SimpleNamespace(tp_size=1, cp_size=2))
    with pytest.raises(UserError, match="parallelism_config has cp_size 2"):
        HeadBalanceCallback().on_train_begin(args, None, None)


def test_lora(tmp_path):
    """The loss of a frozen model reaches its adapters, and equals that of the merged weights."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM")
    gradients = []
    for coeff in (0.0, COEFF):
        torch.manual_seed(0)
        model = peft.get_peft_model(model_of("llama", torch.float32), config)
        trainer = trainer_of(
            tmp_path, model, [balance_runs.callback(coeff=coeff)], dataset(8, True)
        )
        trainer.train()
        assert [log["balance_loss"] > 0 for log in trainer.state.log_history if "loss" in log] == [
            coeff > 0
        ] * 2
        gradients.append(weights(model))
    moved = {
        name for name in gradients[0] if not torch.equal(gradients[0][name], gradients[1][name])
    }
    assert moved
    assert all("lora_" in name for name in moved)


def test_sft_trainer_equals_trainer(tmp_path):
    """TRL's trainer makes its own loss of the log-probabilities that the model returns."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer

    folder = save_with_tokenizer(tmp_path, "llama", REAL_TEXTS)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = dataset(ROWS, masked=True)
    results = []
    for coeff in (0.0, COEFF):
        for sft in (False, True):
            model, callback = model_of("llama"), HeadBalanceCallback(coeff)
            trainer = trainer_of(tmp_path / "plain", model, [callback], data)
            if sft:
                rows = [{key: value.tolist() for key, value in row.items()} for row in data]
                callback = HeadBalanceCallback(coeff)
                trainer = trl.SFTTrainer(
                    model=model,
                    args=trl.SFTConfig(
                        **balance_runs.ARGUMENTS, output_dir=str(tmp_path / "sft"), bf16=False
                    ),
                    train_dataset=Dataset.from_list(rows),
                    processing_class=tokenizer,
                    callbacks=[callback],
                    optimizers=(trainer.optimizer, trainer.lr_scheduler),
                )
            trainer.train()
            logs = [log for log in trainer.state.log_history if "loss" in log]
            results.append((weights(model), [log["balance_loss"] for log in logs]))
    (_, _), (without, none), (expected, losses), (found, logged) = results
    assert none == [0.0] * 3
    assert logged == pytest.approx(losses, rel=1e-4)
    assert_weights(found, expected, without, tolerance=1e-3)


def test_what_trl_weights_otherwise_is_refused():
    args = SimpleNamespace(n_gpu=1, loss_type="dft")
    with pytest.raises(UserError, match="loss_type 'dft' weights targets by their probability"):
        HeadBalanceCallback().on_train_begin(args, None, None)


def test_the_example_of_the_documentation(tmp_path, monkeypatch):
    """As it is written, for a tiny model on a CPU."""
    pytest.importorskip("trl")
    page = Path(__file__).parents[2] / "docs" / "finetuning.md"
    section = page.read_text().split("## In transformers: Trainer and SFTTrainer")[1]
    code = section.split("```python\n")[1].split("```")[0]
    assert '"Qwen/Qwen3-8B"' in code
    folder = save_with_tokenizer(tmp_path, "qwen3", REAL_TEXTS)
    lines = [json.dumps({"text": f"some text, number {number}"}) for number in range(16)]
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names = {}
    code = code.replace("Qwen/Qwen3-8B", str(folder)).replace(
        "SFTConfig(", "SFTConfig(use_cpu=True, "
    )
    exec(code, names)
    logs = [log for log in names["trainer"].state.log_history if "loss" in log]
    assert len(logs) == 2
    assert logs[0]["balance_loss"] == 0 < logs[1]["balance_loss"]
    assert {"head_importance.csv", "head_importance.png"} <= {p.name for p in Path("out").iterdir()}
