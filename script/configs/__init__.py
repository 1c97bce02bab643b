"""Experiment matrix of models, datasets and quantization types, with the training schedules.

Every program that starts a training run reads these tables: `script/train_config.py`, the scripts
in `script/<model>/`, the training script in `examples/llama/` and the two drivers. To change the
matrix, change a table:

    models.py         published architectures, and a small version of each for a CPU
    datasets.py       paths of the token ids of each dataset
    quantizations.py  quantization types: which matmuls run in which format
    trainings.py      iterations, batch sizes and schedules

The other modules turn a choice into a command: parallelism.py (ranks), resolve.py (files and
devices), command.py (the training command), run_names.py (names of folders), launch.py (print or
start the command), scripts.py (the generated scripts), trained_model.py (the model from which the
default collection continues). They need only the standard library, so a machine without the Python
environment can print a command.
"""

import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036  (the user's python3, not the environment's)
    sys.exit(
        f"[ERROR] this is Python {sys.version.split()[0]} ({sys.executable}), but 3.10 or newer is "
        'needed; use the environment\'s: "$(bash script/setup_env.sh)" ' + sys.argv[0]
    )

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root of the repository
