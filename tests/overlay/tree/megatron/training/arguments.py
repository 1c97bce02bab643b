"""Arguments of the trainer, with the same names as in Megatron-LM."""

import argparse


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, default=2)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--global-batch-size", type=int, default=4)
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--save")
    parser.add_argument("--load")
    parser.add_argument("--do", default="train")
    parser.add_argument("--quant", help="a flag that the launcher also has")
    parser.add_argument("--transformer-impl", default="local")
    parser.add_argument("--no-persist-layer-norm", default=True)
    parser.add_argument("--gradient-accumulation-fusion", action="store_true")
    parser.add_argument("--masked-softmax-fusion", action="store_true")
    parser.add_argument("--apply-rope-fusion", action="store_true")
    parser.add_argument("--position-embedding-type", default="learned_absolute")
    return parser.parse_args()


def validate_args(args: argparse.Namespace, defaults: dict | None = None) -> argparse.Namespace:
    args.iteration = 0
    return args
