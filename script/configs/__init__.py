"""The experiment matrix: models x datasets x quantizations, and how long each is trained.

Everything that starts a training is made from these tables: `script/train_config.py`, the scripts
under `script/<model>/`, the training script in `examples/llama/` and the two drivers. To change
the matrix, change a table:

    models.py         architectures as published, and the small one of each, for a CPU
    datasets.py       where the token ids of a dataset lie
    quantizations.py  which matmuls run in which format
    trainings.py      iterations, batches, schedule

The rest turns a choice into a command: layout.py (ranks), resolve.py (files and devices),
command.py (the words), run_names.py (the folders), scripts.py (the generated scripts). Only the
standard library is needed, so that a command can be shown on a machine without the environment.
"""

import sys
from pathlib import Path

if sys.version_info < (3, 10):  # noqa: UP036  (the reader's python3, not the environment's)
    sys.exit(
        f"[ERROR] this is Python {sys.version.split()[0]} ({sys.executable}), and 3.10 or newer is "
        'needed; run it with the environment\'s: "$(bash script/setup_env.sh)" ' + sys.argv[0]
    )

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the folder of megatron/console.py
