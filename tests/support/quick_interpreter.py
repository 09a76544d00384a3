"""Triton's interpreter at half its price."""

from __future__ import annotations

from typing import Any


def swap_language_once() -> None:
    """Have the interpreter swap `triton.language` once per kernel and module, not at every call,
    in this process.

    That is half of the time. What a kernel's start swaps holds for the functions that it calls;
    modules of Triton's own stay swapped.
    """
    from triton.runtime import interpreter

    swapped: set[int] = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        module = id(function.fn.__globals__)
        if module not in swapped:
            swapped.add(module)
            interpreter._patch_lang(function.fn)  # noqa: SLF001
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
