"""Define and check the number of processes and the parallel sizes of a training run.

Parallel sizes that do not divide the model are refused here, before anything starts. The ranks
would detect the problem only minutes later, and each would print its own error message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from configs.architecture import Architecture
from configs.lookup import ConfigError


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Number of processes, and the sizes of tensor, pipeline, context and expert parallelism."""

    nnodes: int = 1
    nproc_per_node: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """Number of processes on all machines."""
        return self.nnodes * self.nproc_per_node

    @property
    def model(self) -> int:
        """Number of processes that share one replica of the dense layers."""
        return self.tp * self.pp * self.cp

    @property
    def data(self) -> int:
        """Number of replicas of the model, each of which trains on different sequences."""
        return self.world // self.model

    def flags(self) -> list[str]:
        """Return the parallelism flags of `pretrain_gpt.py`; a size of 1 needs no flag."""
        words: list[str] = []
        for size, flag in (
            (self.tp, "--tensor-model-parallel-size"),
            (self.pp, "--pipeline-model-parallel-size"),
            (self.cp, "--context-parallel-size"),
            (self.ep, "--expert-model-parallel-size"),
        ):
            if size > 1:
                words += [flag, str(size)]
        # Sequence parallelism saves memory without more communication, and experts require it.
        return [*words, "--sequence-parallel"] if self.tp > 1 else words


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Options with which torchrun connects the machines of a run."""

    node_rank: int = 0
    master_addr: str | None = None
    master_port: int = 6000

    def check(self, parallelism: Parallelism) -> None:
        """Check the address of the first machine and the node rank in a run on several machines.

        Raises:
            ConfigError: if the address is missing, or the node rank is out of range.
        """
        if parallelism.nnodes == 1:
            return
        if not self.master_addr:
            raise ConfigError(
                f"--nnodes is {parallelism.nnodes}, but the first machine is not given; give its "
                "name in --master-addr (or MASTER_ADDR), the same on every machine"
            )
        nnodes = parallelism.nnodes
        if not 0 <= self.node_rank < nnodes:
            raise ConfigError(
                f"--node-rank is {self.node_rank}, but {nnodes} machines have the ranks "
                f"0 to {nnodes - 1}; give one of these"
            )

    def words(self, python: str, parallelism: Parallelism) -> list[str]:
        """Return the part of the training command that precedes `pretrain_gpt.py`.

        It consists of the interpreter, followed by torchrun and its options unless there is only
        one process.
        """
        torchrun = [python, "-m", "torch.distributed.run"]
        processes = ["--nproc-per-node", str(parallelism.nproc_per_node)]
        if parallelism.nnodes == 1:
            return [*torchrun, "--standalone", *processes] if parallelism.world > 1 else [python]
        assert self.master_addr is not None, "check() comes first"
        return [
            *torchrun,
            *("--nnodes", str(parallelism.nnodes), "--node-rank", str(self.node_rank)),
            *("--master-addr", self.master_addr, "--master-port", str(self.master_port)),
            *processes,
        ]


def divisors(*numbers: int) -> list[int]:
    """Return the common divisors of the numbers, in ascending order."""
    return [d for d in range(1, min(numbers) + 1) if all(n % d == 0 for n in numbers)]


def tensor_sizes(model: Architecture) -> list[int]:
    """Return the tensor-parallel sizes that fit a model.

    Several ranks may hold copies of the same key-value head.
    """
    features = [model.num_attention_heads, model.intermediate_size]
    if model.experts is not None:
        features.append(model.experts.moe_intermediate_size)
    groups = model.num_key_value_heads
    return [d for d in divisors(*features) if groups % d == 0 or d % groups == 0]


def _one_of(flag: str, choices: Sequence[int]) -> str:
    listed = ", ".join(map(str, choices[:-1]))
    return f"{flag} {f'{listed} or ' if listed else ''}{choices[-1]} would fit"


#: Flags of `pretrain_gpt.py` that give pipeline stages different numbers of layers.
UNEVEN_STAGES = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--num-layers-in-first-pipeline-stage",
    "--num-layers-in-last-pipeline-stage",
    "--pipeline-model-parallel-layout",
)


def check_model(
    parallelism: Parallelism, model: Architecture, *, uneven_stages: bool = False
) -> None:
    """Check that the parallel sizes fit the architecture of the model.

    Args:
        parallelism: parallel sizes.
        model: architecture of the model.
        uneven_stages: whether the user has assigned layers to pipeline stages explicitly.

    Raises:
        ConfigError: if a size does not fit; the message names sizes that fit.
    """
    layers, tp, pp, ep = model.num_hidden_layers, parallelism.tp, parallelism.pp, parallelism.ep
    possible = tensor_sizes(model)
    if tp not in possible:
        keys = f", {model.num_key_value_heads} of keys and values" if model.latent is None else ""
        raise ConfigError(
            f"--tp {tp} does not fit {model.num_attention_heads} attention heads{keys}; "
            f"{_one_of('--tp', possible)}"
        )
    if layers % pp and not uneven_stages:
        first = layers - (pp - 1) * -(-layers // pp)
        raise ConfigError(
            f"--pp {pp} does not divide {layers} layers; {_one_of('--pp', divisors(layers))}"
            + (
                ", or a first stage of another size: "
                f"`-- --decoder-first-pipeline-num-layers {first}`"
                if first > 0
                else ""
            )
        )
    if model.experts is None:
        if ep > 1:
            raise ConfigError(f"--ep {ep}, but this model has no experts; leave --ep out")
    elif model.experts.n_routed_experts % ep:
        experts = model.experts.n_routed_experts
        raise ConfigError(
            f"--ep {ep} does not divide {experts} experts; {_one_of('--ep', divisors(experts))}"
        )


def check_ranks(parallelism: Parallelism, seq_length: int) -> None:
    """Check that the parallel sizes divide the number of processes and the sequence length.

    Raises:
        ConfigError: if one of the two cannot be divided; the message names a number that can be.
    """
    world, model = parallelism.world, parallelism.model
    tp, pp, cp, ep = parallelism.tp, parallelism.pp, parallelism.cp, parallelism.ep
    if world % model:
        multiple = -(-world // model) * model
        raise ConfigError(
            f"{world} process(es) cannot be cut into tp x pp x cp = {tp} x {pp} x "
            f"{cp}; start a multiple of {model} (--nproc-per-node x --nnodes = {multiple}), "
            "or lower --tp, --pp or --cp"
        )
    experts = tp * pp * ep
    if ep > 1 and world % experts:
        multiple = -(-world // experts) * experts
        raise ConfigError(
            f"{world} process(es) cannot be cut into tp x pp x ep = {tp} x {pp} x "
            f"{ep} for the experts; start a multiple of {experts} (--nproc-per-node x "
            f"--nnodes = {multiple}), or lower --ep"
        )
    parts = tp * (2 * cp if cp > 1 else 1)
    if seq_length % parts:
        raise ConfigError(
            f"--seq-length {seq_length} cannot be cut into {parts} equal parts, as --tp "
            f"{tp} and --cp {cp} need; "
            f"{seq_length // parts * parts or parts} would fit"
        )
