"""Define the operands of the three GEMMs of a matmul, and the formats of all of them.

`SLOTS` names the operands, and `GemmFormats` has one field per slot. `gemm.py` explains the GEMMs
and multiplies whole matrices with these formats; `tiles/attention.py` multiplies tiles.
"""

from dataclasses import dataclass

from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.format_checks import check_operands
from megatron.fake_quant.block_scaling import AmaxSource
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.operand import AS_IT_IS, Operand
from megatron.fake_quant.tiles.checks import check_probabilities
from megatron.fake_quant.tiles.tiling import Tiling

SLOTS = ("fprop_a", "fprop_b", "dgrad_c", "dgrad_b", "wgrad_c", "wgrad_a")
#: Slots of the left and the right operand of each GEMM.
GEMM_SLOTS = {"fprop": SLOTS[0:2], "dgrad": SLOTS[2:4], "wgrad": SLOTS[4:6]}
#: Fields of `GemmFormats` with the accumulator of each GEMM.
ACCUMULATOR_FIELDS = tuple(f"{gemm}_accumulator" for gemm in GEMM_SLOTS)
#: Reduction axes of the tensors in both slots of each GEMM.
AXES = {"fprop": (-1, -1), "dgrad": (-1, -2), "wgrad": (-2, -2)}
#: Slots of the backward pass whose tensors the forward pass also multiplies, mapped to the slots of
#: these tensors in the forward pass.
OF_FORWARD = {"dgrad_b": "fprop_b", "wgrad_a": "fprop_a"}


@dataclass(frozen=True, slots=True)
class GemmFormats:
    """Formats and accumulators of the three GEMMs that compute a matmul and its two gradients.

    An operand of the backward pass with the source "dequantized" is quantized from the values that
    the forward pass multiplied. If the forward pass transforms the operand, the transform is undone
    first. Without a format of its own, the operand has these values unchanged.

    Raises:
        ValueError: if the two operands of a GEMM are transformed differently, which would change
            the product; if the backward pass is straight-through and one of its own operands is
            set; if the source of an operand is "dequantized" and the forward pass does not
            quantize it; if no unit with the accumulator of a GEMM multiplies its operands; or if
            the settings of tiles do not fit A.
    """

    fprop_a: Operand = AS_IT_IS  #: A in C = A B^T, quantized along K
    fprop_b: Operand = AS_IT_IS  #: B in C = A B^T, quantized along K
    dgrad_c: Operand = AS_IT_IS  #: dC in dA = dC B, quantized along N
    dgrad_b: Operand = AS_IT_IS  #: B in dA = dC B, quantized along N
    wgrad_c: Operand = AS_IT_IS  #: dC in dB = dC^T A, quantized along M
    wgrad_a: Operand = AS_IT_IS  #: A in dB = dC^T A, quantized along M
    #: True if the backward pass multiplies the quantized operands of the forward pass, as with a
    #: straight-through estimator; the operands of the backward pass must then not be set
    straight_through: bool = False
    #: True if A (the attention probabilities P) is quantized before its rows are divided by their
    #: sums; see `quantized_matmul`
    unnormalized: bool = False
    #: tiles in which attention is computed (set in the formats of PV); None for whole matrices
    tiling: Tiling | None = None
    #: accumulator of C = A B^T; None, here and below, for the accumulator of torch.matmul
    fprop_accumulator: Accumulator | None = None
    dgrad_accumulator: Accumulator | None = None  #: accumulator of dA = dC B
    wgrad_accumulator: Accumulator | None = None  #: accumulator of dB = dC^T A

    def __post_init__(self) -> None:
        for one, other in GEMM_SLOTS.values():
            transforms = [getattr(self, slot).hadamard for slot in (one, other)]
            if transforms[0] != transforms[1]:
                raise ValueError(
                    f"{one} has the Hadamard transform {transforms[0]} and {other} "
                    f"{transforms[1]}; the two operands of a matmul need the same one, or their "
                    "product changes"
                )

        if self.straight_through and any(
            getattr(self, slot) != AS_IT_IS for slot in SLOTS if not slot.startswith("fprop")
        ):
            raise ValueError(
                "the backward pass is straight-through and some of its operands have a format; "
                "choose one of the two"
            )
        for slot in SLOTS:
            if getattr(self, slot).source == "dequantized":
                self._check_forward_copy(slot)
        if self.tiling is not None:
            check_probabilities(self.tiling, self.fprop_a, unnormalized=self.unnormalized)
        for gemm in GEMM_SLOTS:
            accumulator = self.simulated_accumulator(gemm)
            if accumulator is not None:
                self._check_accumulator(gemm, accumulator)

    def _check_accumulator(self, gemm: str, accumulator: Accumulator) -> None:
        slots = GEMM_SLOTS[gemm]
        for slot in slots:
            operand, forward = getattr(self, slot), OF_FORWARD.get(slot)
            copied = self.straight_through or operand.source == "dequantized"
            if forward and copied and operand.format is None and getattr(self, forward).format:
                raise ValueError(
                    f"{gemm} has the accumulator {accumulator.name} and multiplies a copy that "
                    f"{forward} quantized along another axis, which no unit can do; give {slot} "
                    f"a format, or set the accumulator for other GEMMs only"
                )
        try:
            check_operands(accumulator, *(getattr(self, slot) for slot in slots))
        except ValueError as error:
            raise ValueError(f"{gemm}: {error}") from None

    def _check_forward_copy(self, slot: str) -> None:
        forward = OF_FORWARD.get(slot)
        if forward is None:
            raise ValueError(
                f"{slot} has the source dequantized, but the forward pass has no copy of it; only "
                f"{' and '.join(OF_FORWARD)} have one, so remove the source"
            )
        if getattr(self, forward).format is None:
            raise ValueError(
                f"{slot} has the source dequantized, but the forward pass does not quantize this "
                f"operand; give {forward} a format, or remove the source"
            )

    def simulated_accumulator(self, gemm: str) -> Accumulator | None:
        """Return the accumulator of a GEMM (fprop, dgrad or wgrad), or None for torch.matmul's."""
        accumulator: Accumulator | None = getattr(self, f"{gemm}_accumulator")
        return accumulator if accumulator is not None and accumulator.simulated else None

    @property
    def simulated(self) -> bool:
        """True if any GEMM has an accumulator other than that of torch.matmul."""
        return any(accumulator.simulated for accumulator in self.accumulators.values())

    @property
    def accumulators(self) -> dict[str, Accumulator]:
        """Accumulators that are set, by GEMM, including `fp32`, which stands for torch.matmul."""
        named = ((gemm, getattr(self, f"{gemm}_accumulator")) for gemm in GEMM_SLOTS)
        return {gemm: accumulator for gemm, accumulator in named if accumulator is not None}

    def names(self, *slots: str) -> str:
        """Return the formats of all operands that are made from one tensor, as a text for records.

        Args:
            slots: slots of these operands; equal formats are listed once.
        """
        return " | ".join(dict.fromkeys(str(self.effective(slot)) for slot in slots))

    def effective(self, slot: str) -> Operand:
        """Return the operand, with transform and format, that the slot `slot` really uses.

        In a straight-through backward pass, the gradient is not quantized. The other operand is the
        one that the forward pass quantized, along the forward pass's axis.
        """
        operand: Operand = getattr(
            self, OF_FORWARD.get(slot, slot) if self.straight_through else slot
        )
        return operand

    @property
    def random(self) -> bool:
        """True if any operand is rounded stochastically or transformed with random signs."""
        formats = (getattr(self, slot).format for slot in SLOTS)
        return self.random_signs or any(fmt is not None and fmt.stochastic for fmt in formats)

    @property
    def amax_sources(self) -> set[AmaxSource]:
        """Sources of the amaxes from which the tensor-wide scales of the operands are computed."""
        formats = (getattr(self, slot).format for slot in SLOTS)
        return {fmt.amax_source for fmt in formats if fmt is not None}

    @property
    def random_signs(self) -> bool:
        """True if any operand has a Hadamard transform whose signs are drawn for each call."""
        transforms = (getattr(self, slot).hadamard for slot in SLOTS)
        return any(transform is not None and transform.random for transform in transforms)

    @classmethod
    def uniform(cls, fmt: Format) -> "GemmFormats":
        """Return a `GemmFormats` in which all six operands have the format `fmt`."""
        return cls(**dict.fromkeys(SLOTS, Operand(fmt)))  # type: ignore[arg-type]
