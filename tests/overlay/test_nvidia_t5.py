"""Test that NVIDIA's own T5 training, unmodified, is quantized and collected under the launcher.

    MEGATRON_LM_CHECKOUT=/path/to/Megatron-LM bash tests/run_tests.sh --slow tests/overlay

The checkout must be at tag core_v0.16.1, and the packages that it needs, such as `six`, must be
installed. NVIDIA's script for BERT imports Transformer Engine, and its script for Mamba needs the
CUDA kernels of `mamba_ssm`: neither runs on a CPU, with or without the launcher.
"""

import shlex
import string
import sys

import numpy as np
import pytest
import torch

from megatron.analysis.store import TensorStore
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from tests.overlay.nvidia_checkout import CHECKOUT, losses, trained
from tests.subprocesses import run

MODEL = shlex.split("""
    --encoder-num-layers 2 --decoder-num-layers 1 --hidden-size 64 --ffn-hidden-size 128
    --num-attention-heads 4 --kv-channels 16 --encoder-seq-length 64 --decoder-seq-length 32
    --max-position-embeddings 64 --legacy-tokenizer --tokenizer-type BertWordPieceCase
    --vocab-extra-ids 100 --split 80,10,10
""")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM_CHECKOUT is not set"),
]


@pytest.fixture
def data(tmp_path):
    """Write a vocabulary of letters and 200 documents of 8 random sentences."""
    letters = string.ascii_letters
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    vocabulary += [f"##{letter}" for letter in letters]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    builder = IndexedDatasetBuilder(str(tmp_path / "text.bin"), dtype=np.int32)
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        for sentence in torch.randint(5, 5 + len(letters), (8, 20), generator=generator):
            builder.add_item(sentence)
        builder.end_document()
    builder.finalize(str(tmp_path / "text.idx"))
    return ["--vocab-file", tmp_path / "vocab.txt", "--data-path", tmp_path / "text"]


def test_t5_is_quantized_and_collected(tmp_path, data):
    dump = tmp_path / "dump"
    how = {"script": "pretrain_t5.py", "model": MODEL}
    words = [*data, "--data-cache-path", tmp_path / "cache", "--train-iters", "2"]
    high = trained(*words, **how)
    flags = ["--quant", "mxfp4", "--save-tensors", dump, "--control-iter", "2"]
    low = trained(*words, flags=flags, **how)
    assert len(losses(low)) == 2
    assert losses(low) != losses(high), "the model is quantized"
    table = TensorStore(dump).select()
    modules = set(table["module"])
    assert set(table["quant_type"]) == {"mxfp4"}
    for stack, layers in (("encoder", 2), ("decoder", 1)):
        for layer in range(layers):
            prefix = f"{stack}.layers.{layer}"
            rows = table[table["module"].str.startswith(f"{prefix}.")]
            assert set(rows["layer_idx"]) == {layer}
            assert {f"{prefix}.mlp.linear_fc1", f"{prefix}.self_attention.linear_qkv"} <= modules
    assert "decoder.layers.0.cross_attention.linear_kv" in modules
    verified = run([sys.executable, "-m", "megatron.analysis", "verify", dump])
    assert verified.returncode == 0, verified.stdout + verified.stderr
    assert "0 error(s)" in verified.stdout
