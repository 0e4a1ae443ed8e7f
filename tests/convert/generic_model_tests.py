"""transformers' own generic tests of a model, run on megasink's modelling file.

    python -m tests.convert.generic_model_tests SOURCES [SOURCES...] [-- pytest's arguments]

SOURCES are folders with transformers' `tests`: an unpacked source distribution of the installed
version (`pip download --no-binary :all: --no-deps transformers==5.23.0`), which has the tests of
models, and after it a checkout of git for those of generation and `causal_lm_tester.py`, which it
lacks. The first folder with a file decides. What none of them has is left out and said. Stock Llama
and Qwen3-MoE run beside the models of the file: a test that they fail in the same environment says
nothing of ours.

Needs `parameterized`, and `accelerate` for the tests of device maps. Nothing is fetched: the hub
is switched off. Not collected by pytest but through this command.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import unittest
from collections import Counter, defaultdict
from pathlib import Path

_VARIABLE = "MEGASINK_TRANSFORMERS_SOURCES"


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of transformers' tests that no folder has: each name in them is an empty class."""

    def __init__(self):
        self.names = []

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith("tests."):
            return None
        self.names.append(fullname.removeprefix("tests."))
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        def named(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return skip if name.islower() else type(name, (), {})

        def skip(*_args, **_kwargs):
            raise unittest.SkipTest(f"{module.__name__} is in none of the folders")

        module.__getattr__ = named


def _sources():
    """Transformers' tests, which name each other so, as modules of the package `tests` too."""
    import tests

    tests.__path__ += [str(Path(p) / "tests") for p in os.environ[_VARIABLE].split(os.pathsep)]
    missing = _Missing()
    sys.meta_path.append(missing)
    # Those of pipelines take their models from the hub.
    pipelines = importlib.util.module_from_spec(missing.find_spec("tests.test_pipeline_mixin"))
    missing.exec_module(pipelines)
    sys.modules[pipelines.__name__] = pipelines
    return missing


if _VARIABLE in os.environ and __name__ != "__main__":
    missing = _sources()

    import dataclasses

    import torch
    import transformers
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaModel, Qwen3MoeModel
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )

    # test_configuration_common.py makes transformers anew from the folder's __init__.py.
    transformers.utils.direct_transformers_import = lambda *_args, **_kwargs: transformers
    from megasink.convert.modeling.configuration_megasink import MegasinkConfig
    from megasink.convert.modeling.modeling_megasink import MegasinkForCausalLM, MegasinkModel
    from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester

    if "causal_lm_tester" in missing.names:
        from transformers.testing_utils import _TEXT_MODEL_TESTER_DEFAULTS

        from tests.test_modeling_common import ModelTesterMixin, ids_tensor

        class CausalLMModelTester:
            """What `ModelTesterMixin` asks of a tester."""

            base_model_class = config_class = causal_lm_class = None

            def __init__(self, parent, **options):
                self.__dict__ |= _TEXT_MODEL_TESTER_DEFAULTS | options | {"parent": parent}
                self.head_dim = self.hidden_size // self.num_attention_heads
                self.config_class = self.config_class or self.base_model_class.config_class
                stock = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[self.config_class]
                self.all_model_classes = (self.base_model_class, self.causal_lm_class or stock)

            def prepare_config_and_inputs_for_common(self):
                names = {field.name for field in dataclasses.fields(self.config_class)}
                config = self.config_class(**{n: getattr(self, n) for n in names & {*vars(self)}})
                tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
                return config, {
                    "input_ids": tokens,
                    "attention_mask": tokens.new_ones(tokens.shape),
                }

        class CausalLMModelTest(ModelTesterMixin):
            def setUp(self):
                self.model_tester = self.model_tester_class(self)
                self.all_model_classes = self.model_tester.all_model_classes

    torch.set_num_threads(1)
    AutoConfig.register("megasink", MegasinkConfig)
    AutoModel.register(MegasinkConfig, MegasinkModel)
    AutoModelForCausalLM.register(MegasinkConfig, MegasinkForCausalLM)
    # The tests ask these tables by name which class takes labels.
    MODEL_MAPPING_NAMES["megasink"] = "MegasinkModel"
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["megasink"] = "MegasinkForCausalLM"

    class MegasinkTester(CausalLMModelTester):
        """The tester of a contributor to transformers, with options of a model beside it."""

        base_model_class, config_class = MegasinkModel, MegasinkConfig
        causal_lm_class, options = MegasinkForCausalLM, {}

        def __init__(self, parent, **kwargs):
            dense = {"num_experts": 0, "shared_expert_intermediate_size": 0}
            super().__init__(parent, **dense | self.options | kwargs)

    # Asked of every class whose file has experts or RoPE, whatever the configuration.
    OF_EXPERTS = ("eager_matches_batched_and_grouped_inference", "output_router_logits")

    def _inapplicable(self):
        self.skipTest("this configuration has no such part")

    def _case(name, tester, **values):
        values |= {"model_tester_class": tester, "__module__": __name__}
        return type(name, (CausalLMModelTest, unittest.TestCase), values)

    def _ours(name, **options):
        tester = type(f"{name}Tester", (MegasinkTester,), {"options": options})
        parts = () if "num_experts" in options else OF_EXPERTS
        if "position_embedding_type" in options:
            parts += ("model_rope_scaling",)
        names = [n for n in dir(CausalLMModelTest) if parts and n.startswith(parts, len("test_"))]
        skipped = dict.fromkeys(names, _inapplicable)
        return _case(name, tester, _torch_compile_train_cls=MegasinkForCausalLM, **skipped)

    def _stock(name, model):
        tester = type(f"{name}Tester", (CausalLMModelTester,), {"base_model_class": model})
        return _case(name, tester)

    TestStockLlama = _stock("TestStockLlama", LlamaModel)
    TestStockQwen3Moe = _stock("TestStockQwen3Moe", Qwen3MoeModel)
    TestSink = _ours("TestSink", attention_variant="sink", qk_norm=True, num_key_value_heads=1)
    TestGated = _ours("TestGated", attention_variant="gated", gate_granularity="elementwise")
    TestMoe = _ours(
        "TestMoe", attention_variant="sink", num_experts=8, shared_expert_intermediate_size=36
    )
    TestBiased = _ours(
        "TestBiased",
        attention_variant="kv-bias",
        position_embedding_type="none",
        attention_bias_type="alibi",
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=32,
    )
    del CausalLMModelTest, CausalLMModelTester


class _Counts:
    """By class, the outcome of each test; one failed subtest fails its test."""

    def __init__(self):
        self.outcomes = defaultdict(dict)

    def pytest_runtest_logreport(self, report):
        _, name, test = report.nodeid.split("::")
        before = self.outcomes[name].get(test)
        if "failed" not in (before, report.outcome) or report.failed:
            self.outcomes[name][test] = "skipped" if before == "skipped" else report.outcome

    def lines(self):
        for name, outcomes in self.outcomes.items():
            counts = Counter(outcomes.values())
            kinds = ("passed", "failed", "skipped")
            yield f"{name}: " + ", ".join(f"{counts[kind]} {kind}" for kind in kinds)


def main(arguments):
    import pytest

    at = arguments.index("--") if "--" in arguments else len(arguments)
    sources, rest = arguments[:at], arguments[at + 1 :]
    if not sources or not all((Path(folder) / "tests").is_dir() for folder in sources):
        print(__doc__.split("\n\n")[1], "\n\neach SOURCES a folder with `tests`", file=sys.stderr)
        return 2
    os.environ[_VARIABLE] = os.pathsep.join(sources)
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    alone = ["-c", os.devnull, "--rootdir", str(Path(__file__).parents[2]), "--noconftest"]
    alone += ["-p", "no:cacheprovider", "-W", "ignore", "-q"]
    counts = _Counts()
    code = pytest.main([__file__, *alone, *rest], plugins=[counts])
    print(*counts.lines(), sep="\n")
    left_out = sys.modules["tests.convert.generic_model_tests"].missing.names
    print("modules in none of the folders:", ", ".join(left_out) or "none")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
