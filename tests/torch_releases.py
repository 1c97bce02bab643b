"""Limits of the releases of torch with which the tests run."""

import pytest
import torch

#: True if torch.compile traces names of formats with variants, user-defined formats and quantized
#: matmuls in one graph. torch 2.6 does not, and reports the code that it cannot trace.
TRACES_ALL = torch.torch_version.TorchVersion(torch.__version__) >= "2.7"

traces_all = pytest.mark.skipif(not TRACES_ALL, reason="torch 2.6 cannot trace this in one graph")
reads_new_checkpoints = pytest.mark.skipif(
    not TRACES_ALL, reason="megatron-core 0.19.2 cannot read checkpoints with torch 2.6"
)
