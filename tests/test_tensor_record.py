"""Test that file names can be parsed again, and that an index survives a crash."""

from dataclasses import replace

import pytest

from megatron.tensor_record import (
    TENSOR_NAMES,
    TensorRecord,
    index_name,
    parse_filename,
    read_index,
    safe_name,
)

RECORD = TensorRecord(
    run_id="20250908_095220_abcdef",
    iteration=1,
    micro_batch=0,
    sample_idx=None,
    counter=1,
    timestamp="20250908_095220",
    layer_type="attention",
    layer_idx=0,
    module="decoder.layers.0.self_attention.core_attention",
    operation="forward",
    phase="pre",
    component="FA",
    tensor_name="query",
    quant_type="mxfp8",
    format="mxfp8",
    shape=[4, 2, 8, 16],
    dtype="bfloat16",
    dims="s b a[tp] d",
    global_shape=[4, 2, 8, 16],
    rank={"world": 0, "world_size": 1},
    recomputed=False,
    wall_time=1.5,
)


def test_names_are_those_of_the_documents():
    assert RECORD.filename == "20250908_095220_0001_attention_L0_forward_pre_FA_mxfp8_query.pt"
    linear = replace(
        RECORD, counter=5, layer_type="linear", component="linear", layer_idx=1, tensor_name="input"
    )
    assert linear.filename == "20250908_095220_0005_linear_L1_forward_pre_linear_mxfp8_input.pt"


@pytest.mark.parametrize("world", [0, 7, 123])
@pytest.mark.parametrize("quant_type", ["mxfp8", "FA_linear_hifp8", "mx:e3m4:b16:rceil"])
@pytest.mark.parametrize("layer_type", list(TENSOR_NAMES))
def test_every_name_is_read_back(layer_type, quant_type, world):
    for tensor_name in TENSOR_NAMES[layer_type]:
        record = replace(
            RECORD,
            layer_type=layer_type,
            tensor_name=tensor_name,
            quant_type=quant_type,
            counter=12345,
            rank={"world": world, "world_size": 256},
        )
        parsed = parse_filename(record.filename)
        assert parsed["tensor_name"] == tensor_name
        assert parsed["quant_type"] == safe_name(quant_type)
        assert (parsed["rank"], parsed["counter"]) == (world, 12345)


@pytest.mark.parametrize("name", ["model.pt", "20250908_095220_0001_x.pt", RECORD.filename + ".x"])
def test_other_names_are_not_ours(name):
    assert parse_filename(name) is None


def test_metadata_goes_there_and_back_and_ignores_what_a_later_version_adds():
    metadata = RECORD.to_metadata()
    assert TensorRecord.from_metadata(metadata | {"file": "x", "new": 1}) == RECORD


def test_another_schema_and_missing_fields_are_refused():
    metadata = RECORD.to_metadata()
    with pytest.raises(ValueError, match="schema version 2, but this reader understands 1"):
        TensorRecord.from_metadata(metadata | {"schema_version": 2})
    del metadata["dims"]
    with pytest.raises(ValueError, match="the record lacks dims"):
        TensorRecord.from_metadata(metadata)


def test_a_line_cut_short_by_a_crash_is_skipped_and_any_other_is_an_error(tmp_path):
    path = tmp_path / index_name("run", 0)
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert list(read_index(path)) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a"\n{"a": 2}\n')
    with pytest.raises(ValueError, match="line 2: not a JSON object"):
        list(read_index(path))
