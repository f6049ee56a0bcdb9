"""Executable shape and dtype contracts, duck-typed so that numpy and torch arrays both pass."""

from __future__ import annotations

from typing import Any


def check_shape(name: str, array: Any, *axes: int | None) -> None:
    """Raise ValueError unless `array.shape` equals `axes`; None matches any length."""
    shape = tuple(array.shape)
    if len(shape) != len(axes) or any(
        want is not None and got != want for got, want in zip(shape, axes, strict=True)
    ):
        want_text = ", ".join("*" if axis is None else str(axis) for axis in axes)
        raise ValueError(f"{name}: expected shape [{want_text}], got {list(shape)}")


def check_same_shape(**arrays: Any) -> None:
    """Raise ValueError unless all named arrays have one shape."""
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes differ: {shapes}")


def check_dtype(name: str, array: Any, dtype: Any) -> None:
    """Raise TypeError unless `array.dtype` is `dtype`."""
    if array.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, got {array.dtype}")
