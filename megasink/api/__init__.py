"""What `import megasink` gives: functions and classes for programs and notebooks (docs/python.md).

`NAMES` is the list; everything else in the package may change.
"""

NAMES = {
    "Analysis": "megasink.api.analysis",
    "HeadBalance": "megasink.transformers",
    "HeadBalanceCallback": "megasink.transformers",
    "MetricValues": "megasink.api.analysis",
    "Plot": "megasink.api.analysis",
    "analyze": "megasink.api.analyze",
    "convert_to_hf": "megasink.api.models",
    "drain_first_value": "megasink.intervene.python",
    "dynamic_zeroing": "megasink.intervene.python",
    "intervening": "megasink.intervene.python",
    "load_model": "megasink.api.models",
    "load_run": "megasink.api.models",
    "read_analysis": "megasink.api.analysis",
    "steer_gates": "megasink.intervene.python",
    "zero_heads": "megasink.intervene.python",
}
"""Public name -> the module that has it; imported when the name is first used."""
