"""Compute the shapes of the tensors that a training command collects, from its flags.

A layer's matmuls determine its tensors. `Model` supports the layers of Llama and DeepSeek-V2: dense
layers, experts, and latent attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.lookup import ConfigError, last_value

#: Value of --recompute-granularity with which only core attention is recomputed. With `full`,
#: every module is recomputed.
SELECTIVE = "selective"
LATENT = "--multi-latent-attention"
EXPERTS = "--num-experts"
#: flags for the sizes of latent attention, without which the shapes of its tensors are unknown
LATENT_SIZES = ("--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim")
UNKNOWN = ("--expert-tensor-parallel-size",)  #: flags of models that are not supported


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A kind of collected tensor: its module, its name, and the letter and size of each dimension.

    The number of tokens of an expert is the mean over the experts.
    """

    module: str
    name: str
    dims: tuple[tuple[str, float], ...]
    share: float = 1  #: share of the ranks that have the module; an expert is on one of `ep` ranks


class Model:
    """Model that a training command describes by its flags, with the tensor shapes of one layer."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.layers = self.number("--num-layers", 1)
        self.hidden = self.number("--hidden-size", 1)
        self.heads = self.number("--num-attention-heads", 1)
        self.ffn = self.number("--ffn-hidden-size", 4 * self.hidden)
        self.groups = self.number("--num-query-groups", self.heads)
        self.head_dim = self.number("--kv-channels", self.hidden // self.heads)
        self.tp = self.number("--tensor-model-parallel-size", 1)
        self.cp = self.number("--context-parallel-size", 1)
        self.pp = self.number("--pipeline-model-parallel-size", 1)
        self.ep = self.number("--expert-model-parallel-size", 1)
        self.world = self.number("--nproc-per-node", 1) * self.number("--nnodes", 1)
        self.sequence = self.number("--seq-length", 1) // self.cp
        self.batch = self.number("--micro-batch-size", 1)
        self.gate = 2 if "--swiglu" in words else 1
        self.value_bytes = 2 if {"--bf16", "--fp16"} & set(words) else 4
        self.experts = self.number(EXPERTS, 0)
        self.latent = LATENT in words

    def number(self, flag: str, default: int) -> int:
        """Return the positive integer that follows a flag, or `default` if the flag is not given.

        Raises:
            ConfigError: if the value is not a positive integer.
        """
        text = last_value(flag, self.words)
        if text is None:
            return default
        if not (text.isascii() and text.isdecimal() and 0 < len(text) < 10) or int(text) < 1:
            raise ConfigError(f"{flag} is {text!r}; give an integer of at least 1")
        return int(text)

    @property
    def is_known(self) -> bool:
        """True if the shapes of all tensors follow from the flags."""
        given = {flag for flag in (*UNKNOWN, *LATENT_SIZES) if last_value(flag, self.words)}
        if given & set(UNKNOWN) or (self.latent and not given.issuperset(LATENT_SIZES)):
            return False
        return not self.experts or self._expert_layers() is not None

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that each data-parallel replica processes per iteration."""
        copies = max(1, self.world // (self.tp * self.cp * self.pp))
        return max(1, self.number("--global-batch-size", self.batch) // (self.batch * copies))

    def _expert_layers(self) -> list[bool] | None:
        """Return for each layer whether it has experts; None if the pattern is not supported."""
        pattern = last_value("--moe-layer-freq", self.words) or "1"
        if pattern.isdecimal() and int(pattern):
            return [layer % int(pattern) == 0 for layer in range(self.layers)]
        flags: list[bool] = []
        for term in pattern.split("+"):
            match = re.fullmatch(r"\(*\[([01](?:,[01])*)\](?:\*(\d{1,4}))?\)*", term.strip())
            if match is None:
                return None
            flags += [number == "1" for number in match[1].split(",")] * int(match[2] or 1)
        return flags if len(flags) == self.layers else None

    def tensors(self, layer: int) -> Iterator[Saved]:
        """Yield the tensors of one layer that one rank collects for one micro-batch."""
        yield from self._latent_attention() if self.latent else self._attention()
        experts = self._expert_layers() if self.experts else None
        if experts is None or not experts[layer]:
            yield from self._mlp("mlp", self.ffn, "sb")
            return
        if shared := self.number("--moe-shared-expert-intermediate-size", 0):
            yield from self._mlp("mlp.shared_experts", shared, "sb")
        ffn = self.number("--moe-ffn-hidden-size", self.ffn)
        for expert in range(self.experts):
            yield from self._mlp(f"mlp.experts.local_experts.{expert}", ffn, "t")

    def _mlp(self, module: str, ffn: int, tokens: str) -> Iterator[Saved]:
        for name, h, o, column in (
            ("linear_fc1", self.hidden, self.gate * ffn, True),
            ("linear_fc2", ffn, self.hidden, False),
        ):
            yield from self._linear(f"{module}.{name}", (h, o), column=column, tokens=tokens)

    def _linear(
        self, module: str, sizes: tuple[int, int], *, column: bool, tokens: str = "sb"
    ) -> Iterator[Saved]:
        """Yield the tensors of a column-parallel or row-parallel layer.

        `sizes` are the numbers of input and output features. `tokens` is "t" for an expert. All
        experts of a rank together get the tokens of one rank.
        """
        h, o = sizes
        shard: dict[str, float] = {
            "h": h if column else h // self.tp,
            "o": o // self.tp if column else o,
        }
        share = 1.0
        if tokens == "t":
            share = 1 / self.ep
            topk = self.number("--moe-router-topk", 2)
            shard["t"] = topk * self.sequence * self.batch * self.ep / self.experts
        shapes = {"input": f"{tokens}h", "weight": "oh", "output": f"{tokens}o"}
        yield from self._pairs(module, shapes, shard, share)

    def _attention(self) -> Iterator[Saved]:
        query, kv = self.heads * self.head_dim, self.groups * self.head_dim
        yield from self._linear(
            "self_attention.linear_qkv", (self.hidden, query + 2 * kv), column=True
        )
        yield from self._linear("self_attention.linear_proj", (query, self.hidden), column=False)
        yield from self._core_attention(self.groups, self.head_dim, self.head_dim)

    def _latent_attention(self) -> Iterator[Saved]:
        rank, nope, rope, values = (self.number(flag, 1) for flag in LATENT_SIZES)
        key = nope + rope
        layers = [
            ("linear_kv_down_proj", self.hidden, rank + rope),
            ("linear_kv_up_proj", rank, self.heads * (nope + values)),
        ]
        if compressed := self.number("--q-lora-rank", 0):
            layers += [
                ("linear_q_down_proj", self.hidden, compressed),
                ("linear_q_up_proj", compressed, self.heads * key),
            ]
        else:
            layers.append(("linear_q_proj", self.hidden, self.heads * key))
        for name, h, o in layers:
            yield from self._linear(f"self_attention.{name}", (h, o), column=True)
        yield from self._linear(
            "self_attention.linear_proj", (self.heads * values, self.hidden), column=False
        )
        yield from self._core_attention(self.heads, key, values)

    def _core_attention(self, groups: int, key: int, values: int) -> Iterator[Saved]:
        """Yield the tensors of core attention; `key` and `values` are head dimensions."""
        module = "self_attention.core_attention"
        sizes: dict[str, float] = {
            "a": max(1, self.heads // self.tp),
            "g": max(1, groups // self.tp),
            "h": max(1, self.heads * values // self.tp),
            "k": self.sequence * self.cp,
        }
        yield from self._pairs(module, {"query": "sbad", "key": "sbgd"}, sizes | {"d": key})
        yield from self._pairs(module, {"value": "sbgd", "output": "sbh"}, sizes | {"d": values})
        for name in ("attention_scores", "attention_probs"):
            yield self._saved(module, name, "bask", sizes)

    def _pairs(
        self, module: str, shapes: dict[str, str], sizes: dict[str, float], share: float = 1
    ) -> Iterator[Saved]:
        """Yield each tensor of a module, followed by its gradient of the same shape."""
        for name, letters in shapes.items():
            yield self._saved(module, name, letters, sizes, share)
            yield self._saved(module, f"grad_{name}", letters, sizes, share)

    def _saved(
        self, module: str, name: str, letters: str, sizes: dict[str, float], share: float = 1
    ) -> Saved:
        by_letter = {"s": self.sequence, "b": self.batch} | sizes
        dims = tuple((letter, by_letter[letter]) for letter in letters)
        return Saved(module=module, name=name, dims=dims, share=share)

    def runs(self, saved: Saved) -> int:
        """Return 2 if a tensor is saved twice because its module is recomputed, and otherwise 1."""
        if saved.name.startswith("grad_") or saved.name == "weight":
            return 1
        kind = last_value("--recompute-granularity", self.words)
        if "--recompute-activations" in self.words:
            kind = SELECTIVE
        attention = saved.module.endswith("core_attention")
        return 2 if kind == "full" or (kind == SELECTIVE and attention) else 1
