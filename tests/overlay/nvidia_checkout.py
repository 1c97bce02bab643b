"""Run the training scripts of a checkout of Megatron-LM.

The environment variable MEGATRON_LM_CHECKOUT holds the path of the checkout. If it is not set, the
tests that need a checkout are skipped.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.subprocesses import REPO, environment, free_port, run

CHECKOUT = os.environ.get("MEGATRON_LM_CHECKOUT", "")
PLAIN = Path(__file__).with_name("plain_worker.py")
#: Flags of the smallest possible training; every script also needs flags for its model and data.
TRAINING = shlex.split("""
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --lr-decay-iters 10 --eval-iters 1 --eval-interval 1000 --log-interval 1 --bf16
    --attention-dropout 0 --hidden-dropout 0
""")
GPT = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64
    --max-position-embeddings 64 --mock-data --tokenizer-type NullTokenizer --vocab-size 127
""")
#: Flags that NVIDIA's scripts need on a CPU.
CPU = shlex.split("""
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion
""")


def pretrain(
    *words: str | Path,
    script: str = "pretrain_gpt.py",
    model: list[str] = GPT,
    flags: list[str | Path] | tuple[()] = (),
    ranks: int = 1,
    plain: bool = False,
    cpu: list[str] = CPU,
) -> subprocess.CompletedProcess[str]:
    """Run a script of the checkout; `flags` are flags of the launcher.

    With `plain`, the script runs with plain megatron-core instead of under the launcher.
    """
    env = environment(PYTHONDONTWRITEBYTECODE="1", PYTHONWARNINGS="ignore")
    launcher: list[str | Path] = [sys.executable]
    if ranks > 1:
        where = ["--nproc-per-node", str(ranks), "--master-port", str(free_port())]
        launcher += ["-m", "torch.distributed.run", *where]
    if plain:
        launcher += [PLAIN]
    else:
        env["PYTHONPATH"] = str(REPO)
        launcher += ["-m", "megatron.overlay", *flags]
    command = [*launcher, Path(CHECKOUT, script), *model, *TRAINING, *cpu, *words]
    return run(command, cwd=Path(CHECKOUT), env=env)


def trained(*words: str | Path, **options) -> subprocess.CompletedProcess[str]:
    """Return the result of `pretrain`, which must succeed."""
    result = pretrain(*words, **options)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return result


def losses(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the loss of each iteration as printed."""
    lines = [line for line in result.stdout.splitlines() if " iteration " in line]
    return [field for line in lines for field in line.split("|") if "lm loss:" in field]
