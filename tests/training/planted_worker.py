"""A worker that runs `pretrain_gpt.py` with a fault that benchmarks/divergence.py defines.

python tests/training/planted_worker.py KIND ITERATION STRENGTH CURVE FLAGS...
"""

import sys
from pathlib import Path

from megatron.training.main import main

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import divergence

if __name__ == "__main__":
    from megatron.training import device

    device.prepare()
    kind, iteration, strength, curve = sys.argv[1:5]
    divergence.install(divergence.Plant(kind, int(iteration), 1, float(strength)), Path(curve))
    sys.exit(main(sys.argv[5:]))
