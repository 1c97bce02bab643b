"""Make Triton's interpreter faster, without changing its results.

Almost all of its time is spent on Python objects around numpy's operations.
"""

import dataclasses
import functools
import math
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def shapes(sizes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Return a shape as block types store it, as tensors store it, and its number of values."""
    numel = tl.core.validate_block_shape(sizes)
    return tl.tuple(sizes), tl.tuple([tl.constexpr(size) for size in sizes]), numel


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    values = shape.values if type(shape) is tl.tuple else shape
    sizes = tuple([size if type(size) is int else size.value for size in values])
    self.element_ty = element_ty
    self.shape, _, self.numel = shapes(sizes)
    self.name = f"<{sizes}, {element_ty.name}>"


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    sizes = tuple(type.shape) if type.is_block() else ()
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape = shapes(sizes)[1]
    self.numel = tl.constexpr(math.prod(sizes))


def hasten() -> None:
    """Remove repeated work from the interpreter.

    Triton's language is prepared once for each module, instead of for each call of a function.
    Shapes, and the numpy dtypes of Triton's dtypes, are remembered. Tensors of equal shapes are not
    broadcast. Integer operations are not
    repeated in 64 bits in order to check for an overflow, and the widths of shifts are not checked;
    the compiled code does not check them either.
    """
    prepare, prepared = interpreter._patch_lang, set()

    def once(function: Any) -> Any:
        if id(function.__globals__) not in prepared:
            prepared.add(id(function.__globals__))
            prepare(function)
        return interpreter._LangPatchScope()

    look_up = interpreter._get_np_dtype
    remember = functools.cache(look_up)

    def numpy_dtype(dtype: Any) -> Any:
        # Only the types of scalars can be keys of a cache.
        return remember(dtype.scalar) if type(dtype.scalar) is tl.dtype else look_up(dtype)

    semantic = interpreter.TritonSemantic
    broadcast_shapes = semantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        # Equal shapes are one object.
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast_shapes(self, lhs, rhs)

    interpreter._patch_lang = once
    interpreter._get_np_dtype = numpy_dtype
    tl.core.check_bit_width = lambda value, width: None
    tl.core.block_type.__init__ = init_block_type
    tl.core.tensor.__init__ = init_tensor
    semantic.broadcast_impl_value = broadcast
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
