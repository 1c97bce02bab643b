"""Tiny models of megatron-core that other trainers might build, each with a batch.

`BUILDERS` maps the name of a model to a function that returns the model and a function that
computes a loss. The models are GPT, T5, BERT, ViT, a hybrid of Mamba and attention, a bare stack of
parallel linear layers, and a model without any layer of this project. The mixer of a Mamba layer
needs the CUDA kernels of `mamba_ssm`. `Mixer` takes its place: its two projections are the layers
that a Mamba mixer has, and the state-space scan between them is a running mean.
"""

from collections.abc import Callable

import torch

from megatron.core.enums import ModelType
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.mamba import MambaModel
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import (
    decoder_model_with_local_spec,
    encoder_model_with_local_spec,
)
from megatron.core.models.vision.clip_vit_model import CLIPViTModel
from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)

VOCAB, SEQ, BATCH, HIDDEN = 32, 8, 2, 32
Built = tuple[torch.nn.Module, Callable[[torch.nn.Module], torch.Tensor]]


def config(layers: int = 2) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=48,
        num_attention_heads=2,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        pipeline_dtype=torch.float32,
    )


def tokens(length: int = SEQ) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, length))


def causal(length: int = SEQ) -> torch.Tensor:
    return torch.ones(length, length).triu(1).bool().view(1, 1, length, length)


def gpt(cls: type = GPTModel) -> Built:
    model = cls(config(), get_gpt_layer_local_spec(), VOCAB, SEQ)

    def loss(model):
        inputs = tokens()
        positions = torch.arange(SEQ).expand(BATCH, SEQ)
        return model(inputs, positions, causal(), labels=inputs).mean()

    return model, loss


class Heads(GPTModel):
    """A GPT with one head of this project's layers and one of torch's."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        options = {"config": self.config, "init_method": self.config.init_method}
        self.value_head = ColumnParallelLinear(VOCAB, 16, bias=False, **options)
        self.rank_head = torch.nn.Linear(16, 1)

    def forward(self, *args, labels):
        logits = super().forward(*args)
        return self.rank_head(self.value_head(logits)[0])


def t5() -> Built:
    specs = (
        TransformerBlockSubmodules([spec] * count, layer_norm=WrappedTorchNorm)
        for spec, count in (
            (encoder_model_with_local_spec(), 1),
            (decoder_model_with_local_spec(), 2),
        )
    )
    model = T5Model(config(2), config(1), *specs, VOCAB, 2 * SEQ)

    def loss(model):
        encoded, decoded = tokens(2 * SEQ), tokens()
        visible = torch.zeros(1, 1, 2 * SEQ, 2 * SEQ).bool()
        across = torch.zeros(1, 1, SEQ, 2 * SEQ).bool()
        return model(encoded, decoded, visible, causal(), across, lm_labels=decoded).mean()

    return model, loss


def bert() -> Built:
    model = BertModel(config(), 2, bert_layer_local_spec, VOCAB, SEQ)

    def loss(model):
        inputs = tokens()
        mask = torch.ones(BATCH, SEQ)
        mask[:, -2:] = 0
        losses, binary = model(inputs, mask, torch.zeros_like(inputs), lm_labels=inputs)
        return losses.mean() + binary.square().mean()

    return model, loss


def vit() -> Built:
    model = CLIPViTModel(
        config(),
        get_vit_layer_with_local_spec(),
        ln_pre_impl=WrappedTorchNorm,
        patch_dim=4,
        img_h=8,
        img_w=8,
    )
    return model, lambda model: model(torch.randn(BATCH, 3, 8, 8)).square().mean()


class Mixer(MegatronModule):
    """The two projections of a Mamba mixer around a running mean."""

    def __init__(self, config, d_model, layer_number, **_):
        super().__init__(config)
        options = {"config": config, "init_method": config.init_method, "bias": False}
        self.in_proj = ColumnParallelLinear(d_model, 2 * d_model, **options)
        self.conv1d = torch.nn.Conv1d(d_model, d_model, 2, groups=d_model, padding=1)
        self.out_proj = RowParallelLinear(
            d_model, d_model, input_is_parallel=True, skip_bias_add=True, **options
        )

    def forward(self, hidden, **_):
        x, gate = self.in_proj(hidden)[0].chunk(2, -1)
        x = self.conv1d(x.permute(1, 2, 0))[..., : len(hidden)].permute(2, 0, 1)
        steps = torch.arange(1, len(x) + 1).view(-1, 1, 1)
        return self.out_proj(x.cumsum(0) / steps * gate.sigmoid())


def mamba() -> Built:
    attention = get_gpt_layer_local_spec()
    mixer = MambaLayerSubmodules(norm=WrappedTorchNorm, mixer=Mixer, mamba_bda=get_bias_dropout_add)
    spec = ModuleSpec(
        module=MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mixer),
            attention_layer=attention,
            mlp_layer=attention,
        ),
        params={"post_layer_norm": False},
    )
    model = MambaModel(config(3), spec, VOCAB, SEQ, hybrid_override_pattern="M*M")

    def loss(model):
        inputs = tokens()
        positions = torch.arange(SEQ).expand(BATCH, SEQ)
        return model(inputs, positions, causal(), labels=inputs).mean()

    return model, loss


class Stack(torch.nn.Module):
    """Parallel linear layers without a transformer layer."""

    def __init__(self):
        super().__init__()
        options = {"config": config(), "init_method": torch.nn.init.xavier_normal_, "bias": False}
        self.blocks = torch.nn.ModuleList(
            ColumnParallelLinear(HIDDEN, HIDDEN, **options) for _ in range(3)
        )
        self.readout = torch.nn.Linear(HIDDEN, 4)
        # what the pipeline schedules read
        self.config, self.model_type = config(), ModelType.encoder_or_decoder

    def set_input_tensor(self, tensor):
        """Do nothing: there is no previous pipeline stage."""

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x)[0])
        return self.readout(x)


def stack() -> Built:
    return Stack(), lambda model: model(torch.randn(SEQ, BATCH, HIDDEN)).square().mean()


class Plain(torch.nn.Module):
    """A model without any layer of this project."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(HIDDEN, HIDDEN)
        self.attention = torch.nn.MultiheadAttention(HIDDEN, 2)

    def forward(self, x):
        x = self.first(x)
        return self.attention(x, x, x)[0]


def block() -> Built:
    model = TransformerBlock(config(), get_gpt_layer_local_spec())
    model.model_type = ModelType.encoder_or_decoder  # what the pipeline schedules read

    def loss(model):
        hidden = torch.randn(SEQ, BATCH, HIDDEN).requires_grad_()
        return model(hidden, causal()).square().mean()

    return model, loss


def plain() -> Built:
    return Plain(), lambda model: model(torch.randn(SEQ, BATCH, HIDDEN)).square().mean()


BUILDERS: dict[str, Callable[[], Built]] = {
    "gpt": gpt,
    "gpt with heads": lambda: gpt(Heads),
    "t5": t5,
    "bert": bert,
    "vit": vit,
    "mamba": mamba,
    "stack": stack,
    "block": block,
    "plain": plain,
}
