"""Exact, bounded arithmetic on hostile text: what `12 + 3 * 4` comes to, without running it.

Only numbers, the signs `+ - * / // % **` and parentheses are understood. Length, depth and the size of every intermediate value are
bounded before anything is computed, so that no text can make it slow.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

MAX_CHARS = 200
MAX_BITS = 256
_ALPHABET = re.compile(r"[\d.+\-*/%() ]+", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d{1,40}(?:\.\d{0,20})?|\.\d{1,20})", re.ASCII)
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def number(text: str) -> Fraction | None:
    """The value of a plain integer or decimal; None for anything else."""
    text = text.strip()
    return Fraction(text) if _NUMBER.fullmatch(text) else None


def evaluate(expression: str) -> Fraction | None:
    """The exact value of an arithmetic expression; None where it is not one, or is too big to be worth computing."""
    expression = expression.strip()
    if len(expression) > MAX_CHARS or not _ALPHABET.fullmatch(expression):
        return None
    try:
        tree = ast.parse(expression, mode="eval")
        return _value(tree.body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def plain(value: Fraction) -> str:
    """`24` for a whole number, `7/2` for any other."""
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATORS:
            return _bounded(Fraction(_OPERATORS[type(node.op)](left, right)))
    raise ValueError("not arithmetic")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > 64:
        raise ValueError("exponent out of bounds")
    return _bounded(Fraction(base ** int(exponent)))


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() > MAX_BITS or value.denominator.bit_length() > MAX_BITS:
        raise ValueError("number out of bounds")
    return value
