"""A variant as a user would add it, in a module of one's own: one sink per key/value group."""

from megasink.variants import Kernel, Parameter, Variant, register, zero_value


def _per_head(parameters, heads):
    sink_G = parameters["group_sink"]
    return sink_G.repeat_interleave(heads // len(sink_G))


def _attend(config, parameters, query_BHTD, key_BGSD, value_BGSD, **options):
    from megasink.attention import attention

    sink_H = _per_head(parameters, query_BHTD.shape[1])
    return attention(query_BHTD, key_BGSD, value_BGSD, variant="sink", sink_H=sink_H, **options)


def _logit(config, parameters, query_BHTD, scale):
    return _per_head(parameters, query_BHTD.shape[1])[None, :, None]


register(
    Variant(
        name="sink-per-group",
        description="one sink logit per key/value group (a test of megasink)",
        attend=_attend,
        kernel=Kernel(variant="sink", gate_gradient=True),
        slot_logit=_logit,
        slot_value=zero_value,
        parameters=(Parameter(name="group_sink", shape=lambda config: (config.num_query_groups,)),),
        logs_slot_logit=True,
    )
)
