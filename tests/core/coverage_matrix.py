"""Table of what is quantized, collected, named and refused, by trainer and model.

`tests/core/test_reach.py` tests each cell. This program prints the tables of
docs/coverage_matrix.md, in English and Chinese:

    python -m tests.core.coverage_matrix
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    """Expected results for one model if mxfp8 and all tensors are requested."""

    title: str
    quantized: tuple[str, ...]  #: some of the modules that are quantized and collected
    high_precision: tuple[str, ...]  #: layers of this project that stay in high precision
    named: tuple[str, ...]  #: modules that are not reached, and are named in log and run card
    refused: str  #: the module that the error names if linear layers of another class are used
    layers: int  #: number of layers of this project


EXPECTED = {
    "gpt": Expected(
        "GPT",
        (
            "decoder.layers.1.mlp.linear_fc2",
            "decoder.layers.0.self_attention.core_attention",
        ),
        ("output_layer",),
        (),
        "decoder.layers.0.self_attention.linear_proj",
        11,
    ),
    "gpt with heads": Expected(
        "a subclass of GPT with heads of its own",
        ("value_head", "decoder.layers.1.mlp.linear_fc2"),
        ("output_layer",),
        ("rank_head (Linear)",),
        "decoder.layers.0.self_attention.linear_proj",
        12,
    ),
    "t5": Expected(
        "T5",
        (
            "encoder.layers.0.mlp.linear_fc1",
            "decoder.layers.0.mlp.linear_fc1",
            "decoder.layers.1.cross_attention.linear_kv",
        ),
        ("lm_head.output_layer",),
        (),
        "encoder.layers.0.self_attention.linear_proj",
        24,
    ),
    "bert": Expected(
        "BERT",
        ("encoder.layers.1.self_attention.linear_qkv",),
        ("output_layer",),
        ("lm_head.dense (Linear)", "binary_head (Linear)", "pooler.dense (Linear)"),
        "encoder.layers.0.self_attention.linear_proj",
        11,
    ),
    "vit": Expected(
        "ViT",
        ("decoder.layers.1.self_attention.core_attention",),
        (),
        ("the model itself (CLIPViTModel)", "conv1 (Conv2d)"),
        "decoder.layers.0.self_attention.linear_proj",
        10,
    ),
    "mamba": Expected(
        "Mamba with an attention layer",
        ("decoder.layers.2.mixer.in_proj", "decoder.layers.1.mlp.linear_fc1"),
        ("output_layer",),
        (
            "decoder.layers.0.mixer.conv1d (Conv1d)",
            "decoder.layers.2.mixer.conv1d (Conv1d)",
        ),
        "decoder.layers.0.mixer.in_proj",
        10,
    ),
    "stack": Expected(
        "a stack of parallel linear layers",
        ("blocks.0", "blocks.2"),
        (),
        ("readout (Linear)",),
        "blocks.0",
        3,
    ),
    "block": Expected(
        "a bare TransformerBlock",
        ("layers.0.self_attention.linear_qkv", "layers.1.mlp.linear_fc2"),
        (),
        (),
        "layers.0.self_attention.linear_proj",
        10,
    ),
}
#: A model without any layer of this project is refused by every trainer.
PLAIN = "plain"
#: Trainers whose cells `test_reach.py` tests, by the name that its worker takes.
TRAINERS = {"schedules": "pipeline schedules", "loop": "loop without schedules"}

#: Cells of NVIDIA's trainer that the slow tests of tests/overlay cover, by model.
OF_NVIDIA = {
    "gpt": "quantized, collected, named, refused (slow tests)",
    "t5": "quantized, collected, named (slow test)",
}


def tables() -> str:
    """Return the tables of docs/coverage_matrix.md."""
    whole = "quantized, collected, named, refused"
    lines = [
        "| model | this project's trainer | NVIDIA's trainer | " + " | ".join(TRAINERS.values()),
        "| --- | --- | --- |" + " --- |" * len(TRAINERS),
    ]
    for name, expected in EXPECTED.items():
        own = whole if name == "gpt" else "no such model"
        nvidia = OF_NVIDIA.get(name, "as with the pipeline schedules")
        cells = [expected.title, own, nvidia, *[whole] * len(TRAINERS)]
        lines.append(f"| {' | '.join(cells)} |")
    lines[0] += " |"
    cells = ["a model without layers of megatron-core", "no such model", *["refused"] * 3]
    lines += [f"| {' | '.join(cells)} |", ""]
    lines += [
        "| model | layers that stay in high precision | modules that are named |",
        "| --- | --- | --- |",
    ]
    for expected in EXPECTED.values():
        kept, named = (", ".join(x) or "none" for x in (expected.high_precision, expected.named))
        lines.append(f"| {expected.title} | {kept} | {named} |")
    return "\n".join(lines) + "\n"


#: translation of every cell that is not a name of modules
CHINESE = {
    "model": "模型",
    "this project's trainer": "本项目的训练程序",
    "NVIDIA's trainer": "NVIDIA 的训练程序",
    "pipeline schedules": "流水线调度",
    "loop without schedules": "不用调度的循环",
    "quantized, collected, named, refused": "量化、收集、列出、拒绝",
    "quantized, collected, named, refused (slow tests)": "量化、收集、列出、拒绝 (慢速测试)",
    "quantized, collected, named (slow test)": "量化、收集、列出 (慢速测试)",
    "as with the pipeline schedules": "与流水线调度相同",
    "no such model": "没有这种模型",
    "refused": "拒绝",
    "a subclass of GPT with heads of its own": "自带输出头的 GPT 子类",
    "Mamba with an attention layer": "带一个注意力层的 Mamba",
    "a stack of parallel linear layers": "由并行线性层堆叠成的模型",
    "a bare TransformerBlock": "单独的 TransformerBlock",
    "a model without layers of megatron-core": "没有 megatron-core 层的模型",
    "layers that stay in high precision": "保持高精度的层",
    "modules that are named": "列出的模块",
    "none": "无",
    "the model itself (CLIPViTModel), conv1 (Conv2d)": "模型本身 (CLIPViTModel)、conv1 (Conv2d)",
}


def chinese_tables() -> str:
    """Return the tables in Chinese, with the names of modules unchanged."""
    lines = []
    for line in tables().splitlines():
        cells = [CHINESE.get(cell, cell) for cell in line.strip("| ").split(" | ")]
        lines.append(f"| {' | '.join(cells)} |" if line else "")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(tables(), chinese_tables(), sep="\n", end="")
