"""Chat messages as expressions: whole, or by their two ends."""

from __future__ import annotations

from .expressions import Expression, RoleExpression, checked


def system(expr: Expression | str) -> Expression:
    """A system message."""
    return RoleExpression("system", "all", checked(expr))


def user(expr: Expression | str) -> Expression:
    """A user message."""
    return RoleExpression("user", "all", checked(expr))


def assistant(expr: Expression | str) -> Expression:
    """An assistant message; usually holds a `gen`."""
    return RoleExpression("assistant", "all", checked(expr))


def system_begin() -> Expression:
    """Open a system message."""
    return RoleExpression("system", "begin")


def system_end() -> Expression:
    """Close the system message."""
    return RoleExpression("system", "end")


def user_begin() -> Expression:
    """Open a user message."""
    return RoleExpression("user", "begin")


def user_end() -> Expression:
    """Close the user message."""
    return RoleExpression("user", "end")


def assistant_begin() -> Expression:
    """Open an assistant message."""
    return RoleExpression("assistant", "begin")


def assistant_end() -> Expression:
    """Close the assistant message."""
    return RoleExpression("assistant", "end")
