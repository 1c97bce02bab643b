"""How many processes, and what each holds: tensor, pipeline, context and expert parallelism.

What does not divide is refused here, before anything starts: ranks that find it out by themselves
do so minutes later, each with a message of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.architecture import Architecture
from configs.lookup import ConfigError


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Processes and how they share the model."""

    nnodes: int = 1
    nproc_per_node: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """Processes of all machines."""
        return self.nnodes * self.nproc_per_node

    @property
    def model(self) -> int:
        """Processes that hold one copy of the dense layers."""
        return self.tp * self.pp * self.cp

    @property
    def data(self) -> int:
        """Copies, each of which trains on other sequences."""
        return self.world // self.model

    def flags(self) -> list[str]:
        """Those of `pretrain_gpt.py`; none for what is not parallel."""
        words: list[str] = []
        for size, flag in (
            (self.tp, "--tensor-model-parallel-size"),
            (self.pp, "--pipeline-model-parallel-size"),
            (self.cp, "--context-parallel-size"),
            (self.ep, "--expert-model-parallel-size"),
        ):
            if size > 1:
                words += [flag, str(size)]
        # less memory for the same messages, and experts demand it
        return [*words, "--sequence-parallel"] if self.tp > 1 else words


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Where the machines find each other; what torchrun takes."""

    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 6000

    def check(self, layout: Parallelism) -> None:
        """Refuse machines that would not find each other.

        Raises:
            ConfigError: the first of them has no name, or this one's number is none of theirs.
        """
        if layout.nnodes == 1:
            return
        if not self.master_addr:
            raise ConfigError(
                f"--nnodes is {layout.nnodes}, but nothing says which machine is the first; give "
                "its name in --master-addr (or MASTER_ADDR), the same on every machine"
            )
        if not 0 <= self.node_rank < layout.nnodes:
            raise ConfigError(
                f"--node-rank is {self.node_rank}; of {layout.nnodes} machines the ranks are 0 to "
                f"{layout.nnodes - 1}"
            )

    def words(self, python: str, layout: Parallelism) -> list[str]:
        """What stands before `pretrain_gpt.py`; one process needs no launcher."""
        torchrun = [python, "-m", "torch.distributed.run"]
        processes = ["--nproc-per-node", str(layout.nproc_per_node)]
        if layout.nnodes == 1:
            return [*torchrun, "--standalone", *processes] if layout.world > 1 else [python]
        assert self.master_addr is not None, "check() comes first"
        return [
            *torchrun,
            *("--nnodes", str(layout.nnodes), "--node-rank", str(self.node_rank)),
            *("--master-addr", self.master_addr, "--master-port", str(self.master_port)),
            *processes,
        ]


def divisors(*numbers: int) -> list[int]:
    """What divides all of them."""
    return [d for d in range(1, min(numbers) + 1) if all(n % d == 0 for n in numbers)]


def tensor_sizes(model: Architecture) -> list[int]:
    """Numbers of ranks that can share a layer; a head of keys and values may be in several."""
    features = [model.num_attention_heads, model.intermediate_size]
    if model.experts is not None:
        features.append(model.experts.moe_intermediate_size)
    groups = model.num_key_value_heads
    return [d for d in divisors(*features) if groups % d == 0 or d % groups == 0]


def _one_of(flag: str, choices: Sequence[int]) -> str:
    listed = ", ".join(map(str, choices[:-1]))
    return f"{flag} {f'{listed} or ' if listed else ''}{choices[-1]} would do"


#: Flags of `pretrain_gpt.py` that cut the layers into stages of different size.
UNEVEN_STAGES = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--num-layers-in-first-pipeline-stage",
    "--num-layers-in-last-pipeline-stage",
    "--pipeline-model-parallel-layout",
)


def check_model(layout: Parallelism, model: Architecture, *, uneven_stages: bool = False) -> None:
    """Refuse a layout that the model cannot be cut into.

    Args:
        layout: the ranks.
        model: the architecture.
        uneven_stages: the user has said which layers go to which pipeline stage.

    Raises:
        ConfigError: says what would do.
    """
    layers = model.num_hidden_layers
    possible = tensor_sizes(model)
    if layout.tp not in possible:
        keys = f", {model.num_key_value_heads} of keys and values" if model.latent is None else ""
        raise ConfigError(
            f"--tp {layout.tp} does not fit {model.num_attention_heads} attention heads{keys}; "
            f"{_one_of('--tp', possible)}"
        )
    if layers % layout.pp and not uneven_stages:
        first = layers - (layout.pp - 1) * -(-layers // layout.pp)
        raise ConfigError(
            f"--pp {layout.pp} does not divide {layers} layers; {_one_of('--pp', divisors(layers))}"
            + (
                ", or a first stage of another size: "
                f"`-- --decoder-first-pipeline-num-layers {first}`"
                if first > 0
                else ""
            )
        )
    if model.experts is None:
        if layout.ep > 1:
            raise ConfigError(f"--ep {layout.ep}, but this model has no experts; leave --ep out")
    elif model.experts.n_routed_experts % layout.ep:
        experts = model.experts.n_routed_experts
        raise ConfigError(
            f"--ep {layout.ep} does not divide {experts} experts; "
            f"{_one_of('--ep', divisors(experts))}"
        )


def check_ranks(layout: Parallelism, seq_length: int) -> None:
    """Refuse a number of processes that is no multiple of what the layout needs, and a sequence
    that cannot be shared.

    Raises:
        ConfigError: says what would do.
    """
    world, model = layout.world, layout.model
    if world % model:
        multiple = -(-world // model) * model
        raise ConfigError(
            f"{world} process(es) cannot be cut into tp x pp x cp = {layout.tp} x {layout.pp} x "
            f"{layout.cp}; start a multiple of {model} (--nproc-per-node x --nnodes = {multiple}), "
            "or lower --tp, --pp or --cp"
        )
    of_experts = layout.tp * layout.pp * layout.ep
    if layout.ep > 1 and world % of_experts:
        multiple = -(-world // of_experts) * of_experts
        raise ConfigError(
            f"{world} process(es) cannot be cut into tp x pp x ep = {layout.tp} x {layout.pp} x "
            f"{layout.ep} for the experts; start a multiple of {of_experts} (--nproc-per-node x "
            f"--nnodes = {multiple}), or lower --ep"
        )
    parts = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
    if seq_length % parts:
        raise ConfigError(
            f"--seq-length {seq_length} cannot be cut into {parts} equal parts, as --tp "
            f"{layout.tp} and --cp {layout.cp} need; "
            f"{seq_length // parts * parts or parts} would do"
        )
