"""A calculator for untrusted text: numbers, + - * / // % **, brackets. It walks the syntax tree; Python evaluates nothing."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

MAX_CHARACTERS = 64
MAX_MAGNITUDE = 1e15
MAX_EXPONENT = 64
_ALLOWED = re.compile(r"[0-9\s+\-*/%().]*")
_BETWEEN_DIGITS = re.compile(r"(?<=[\d.])\s+(?=[\d.])")

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class CalculatorError(ValueError):
    """The expression has no value; the text says why, in a few words meant for the policy."""


def join_digits(text: str) -> str:
    """Close gaps inside numbers: a tokenizer that writes numbers digit by digit prints `1 1 8` for 118."""
    return _BETWEEN_DIGITS.sub("", text)


def calculate(text: str) -> str:
    """The value of an expression as text: an integer if it is one, else at most six decimals. Raises `CalculatorError`."""
    text = join_digits(text.strip())
    if not text:
        raise CalculatorError("nothing to calculate")
    if len(text) > MAX_CHARACTERS:
        raise CalculatorError("too long")
    if not _ALLOWED.fullmatch(text):
        raise CalculatorError("not a formula")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise CalculatorError("not a formula") from None
    return _format(_value(tree.body))


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > MAX_EXPONENT:
            raise CalculatorError("too large")
        try:
            result = _BINARY[type(node.op)](left, right)
        except ZeroDivisionError:
            raise CalculatorError("division by zero") from None
        except OverflowError:
            raise CalculatorError("too large") from None
        return _bounded(result)
    raise CalculatorError("not a formula")


def _bounded(value: float) -> float:
    if isinstance(value, complex) or value != value:
        raise CalculatorError("not a number")
    if abs(value) > MAX_MAGNITUDE:
        raise CalculatorError("too large")
    return value


def _format(value: float) -> str:
    if isinstance(value, int) or value.is_integer():
        return str(int(value))
    return f"{value:.6f}".rstrip("0")
