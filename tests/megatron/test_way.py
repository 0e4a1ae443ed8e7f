"""The way of a query from CoreAttention.forward to the kernel is short, and it keeps its name."""

from tests.distributed.layout import SINGLE

OWN_CALL = {"v-bias"}  # its record is on the way


def test_a_query_goes_through_seven_frames_in_six_files_by_one_name(pool):
    (ways,) = pool.run("tests.megatron.way_tasks:ways", SINGLE)
    assert {"sink", "vanilla", "gated", "k-bias", "kv-bias", "off-by-one"} < ways.keys()
    for variant, way in ways.items():
        first, *others = way["frames"]
        extra = variant in OWN_CALL
        assert first[:2] == ("megatron/core_attention.py", "CoreAttention.forward")
        assert len(way["frames"]) <= 7 + extra, (variant, way)
        assert len({place for place, *_ in way["frames"]}) <= 6 + extra, (variant, way)
        # Megatron calls forward with a `query`.
        assert set(first[2]) == {"query", "query_BHTD"}, variant
        named = {name for *_, names in others for name in names}
        assert named == {"query_BHTD"}, (variant, way)
        assert way["packed"] == 1, variant
