"""Small changes that a machine makes of a module: of its Python, and of SQL in its texts.

Each is a change of a few characters that a person might make by mistake: a bound that is inclusive
or not, a condition that is left out, another order, no lock, one more or less. What is only said,
in docstrings and errors, is left alone.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Change:
    """One part of a text, which becomes another one."""

    begin: int
    end: int
    after: str
    line: int
    """The first line of the statement, or of the text in it, that is changed."""
    last_line: int
    kind: str
    """What is done, in a few words."""

    def of(self, whole: str) -> str:
        """Return a module with the change."""
        return whole[: self.begin] + self.after + whole[self.end :]


COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=",),
    ast.LtE: ("<",),
    ast.Gt: (">=",),
    ast.GtE: (">",),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
}
SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "*",
    ast.BitOr: "&",
    ast.BitAnd: "|",
}
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "abs": "", "sorted": "list"}
"""Functions that are called, and what is called instead; nothing: the argument alone."""

QUIET = ("log", "logger", "metrics", "count")
"""What is called for people only: its calls stay."""


def changes(whole: str) -> Iterator[Change]:
    """Give all changes of a module, in the order of their places."""
    found = {(one.begin, one.end, one.after): one for one in _Python(whole).changes()}
    yield from (found[place] for place in sorted(found))


def compiles(whole: str) -> bool:
    """Whether a module that was changed is Python still."""
    try:
        compile(whole, "a change", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


class _Python:
    """The changes of a module, by its syntax."""

    def __init__(self, whole: str) -> None:
        self.whole = whole
        starts, at = [], 0
        for line in whole.splitlines(keepends=True):
            starts.append((at, line))
            at += len(line)
        self._starts = starts
        self._module = ast.parse(whole)
        self._left_alone = {id(one) for one in self._said()}

    def changes(self) -> Iterator[Change]:
        for node in ast.walk(self._module):
            if id(node) in self._left_alone:
                continue
            if isinstance(node, ast.stmt):
                yield from self._of_statement(node)
                test = getattr(node, "test", None)
            else:
                yield from self._of(node)
                test = node.test if isinstance(node, ast.IfExp) else None
            if test is not None and not isinstance(test, ast.Constant):
                yield self._instead(test, f"(not ({self._text(test)}))", "negated")

    def _said(self) -> Iterator[ast.AST]:
        """What is for people, or for a type checker: docstrings, errors, lines of a log, types."""
        for node in ast.walk(self._module):
            parts: list[ast.AST | None] = []
            match node:
                case ast.Expr(value=ast.Constant(value=str()) as text):
                    parts = [node, text]
                case ast.Raise(exc=ast.Call(args=args, keywords=keywords)):
                    parts = [*args, *keywords]
                case ast.Expr(value=ast.Call(func=function)) if _is_quiet(function):
                    parts = [node]
                case ast.AnnAssign(annotation=annotation):
                    parts = [annotation]
                case ast.arg(annotation=annotation):
                    parts = [annotation]
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    parts = [node.returns, *node.decorator_list]
                case ast.ClassDef(decorator_list=decorators):
                    parts = [*decorators]
                case ast.Assert():
                    parts = [node]
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    parts = [node]
            for part in parts:
                if part is not None:
                    yield from ast.walk(part)

    def _of(self, node: ast.AST) -> Iterator[Change]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=rest):
                for before, operator, after in zip([left, *rest], ops, rest, strict=False):
                    for other in COMPARISONS[type(operator)]:
                        yield self._between(before, after, other)
            case ast.BoolOp(op=operator, values=values):
                other = "or" if isinstance(operator, ast.And) else "and"
                for before, after in itertools.pairwise(values):
                    yield self._between(before, after, other)
                for value in values:
                    neutral = "True" if isinstance(operator, ast.And) else "False"
                    yield self._instead(value, neutral, "without a condition")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._instead(node, f"({self._text(operand)})", "without not")
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in SIGNS:
                yield self._between(left, right, SIGNS[type(operator)])
            case ast.Constant() | ast.JoinedStr():
                yield from self._of_constant(node)
            case ast.Call(func=ast.Name(id=name) as function, args=[first, *_]) if name in CALLS:
                called = CALLS[name]
                if called and not (called == "list" and node.keywords):
                    yield self._instead(function, called, f"{name} is {called}")
                else:
                    text = f"{called}({self._text(first)})"
                    yield self._instead(node, text, f"{name} is {called or 'left out'}")

    def _of_constant(self, node: ast.Constant | ast.JoinedStr) -> Iterator[Change]:
        match node:
            case ast.Constant(value=bool() as value):
                yield self._instead(node, str(not value), "the other truth value")
            case ast.Constant(value=int() | float() as number):
                yield self._instead(node, repr(number + 1), "one more")
            case ast.Constant(value=str()) | ast.JoinedStr():
                yield from self._in_sql(node)

    def _of_statement(self, node: ast.stmt) -> Iterator[Change]:
        match node:
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield self._instead(node, "pass", "a call is left out")
            case ast.Raise():
                yield self._instead(node, "pass", "nothing is raised")
            case ast.AugAssign():
                yield self._instead(node, "pass", "nothing is added")
            case ast.Continue():
                yield self._instead(node, "break", "break")
            case ast.Break():
                yield self._instead(node, "continue", "continue")

    def _in_sql(self, node: ast.expr) -> Iterator[Change]:
        begin, end = self._place(node)
        text = self.whole[begin:end]
        if not IS_SQL.search(text):
            return
        first = node.lineno
        for one in changes_of_sql(text):
            line = first + text.count("\n", 0, one.begin)
            yield Change(
                begin=begin + one.begin,
                end=begin + one.end,
                after=one.after,
                line=line,
                last_line=line,
                kind=f"SQL: {one.kind}",
            )

    def _between(self, before: ast.expr, after: ast.expr, other: str) -> Change:
        """Another operator between two operands, whatever brackets there are."""
        begin, end = self._place(before)[1], self._place(after)[0]
        text = self.whole[begin:end]
        found = OPERATOR.search(text)
        assert found, text
        begin, end = begin + found.start(), begin + found.end()
        return self._change(begin, end, other, f"{found.group()} is {other}")

    def _instead(self, part: ast.AST, after: str, kind: str) -> Change:
        return self._change(*self._place(part), after, kind)

    def _change(self, begin: int, end: int, after: str, kind: str) -> Change:
        line = self.whole.count("\n", 0, begin) + 1
        last_line = self.whole.count("\n", 0, end) + 1
        return Change(begin=begin, end=end, after=after, line=line, last_line=last_line, kind=kind)

    def _text(self, node: ast.AST) -> str:
        begin, end = self._place(node)
        return self.whole[begin:end]

    def _place(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, (ast.expr, ast.stmt))
        assert node.end_lineno
        assert node.end_col_offset is not None
        return self._at(node.lineno, node.col_offset), self._at(
            node.end_lineno, node.end_col_offset
        )

    def _at(self, line: int, byte: int) -> int:
        start, text = self._starts[line - 1]
        return start + len(text.encode()[:byte].decode())


OPERATOR = re.compile(
    r"<=|>=|==|!=|//|\bnot\s+in\b|\bis\s+not\b|\bin\b|\bis\b|\band\b|\bor\b|[<>+*/%|&-]"
)


def _is_quiet(function: ast.expr) -> bool:
    match function:
        case ast.Attribute(value=ast.Name(id=name)) | ast.Name(id=name):
            return name in QUIET
    return False


# SQL

IS_SQL = re.compile(
    r"\b(SELECT|UPDATE|DELETE FROM|INSERT INTO|WHERE|ORDER BY|IS NULL|IS NOT NULL|FOR UPDATE)\b"
    r"|%\(\w+\)s"
)
"""Statements, and parts of them, are written in capitals."""


@dataclass(frozen=True, kw_only=True)
class _Part:
    begin: int
    end: int
    after: str
    kind: str


SWAPPED = {
    "AND": "OR",
    "OR": "AND",
    "greatest": "least",
    "least": "greatest",
    "min(": "max(",
    "max(": "min(",
    "IS NOT NULL": "IS NULL",
    "IS NULL": "IS NOT NULL",
    "NOT EXISTS": "EXISTS",
    "UNION ALL": "UNION",
    "now()": "clock_timestamp()",
    "clock_timestamp()": "now()",
    "= ANY": "<> ALL",
    "<> ALL": "= ANY",
    "'on'": "'off'",
}
LEFT_OUT = (
    *("FOR UPDATE", "FOR NO KEY UPDATE", "FOR SHARE", "SKIP LOCKED", "DISTINCT", "DESC"),
    *("NULLS FIRST", "NULLS LAST", "ON CONFLICT DO NOTHING", "MATERIALIZED"),
)
_WORDS = re.compile(
    "|".join(
        rf"(?<![\w']){re.escape(one)}(?![\w'])" if one[-1].isalnum() else re.escape(one)
        for one in sorted({*SWAPPED, *LEFT_OUT}, key=len, reverse=True)
    )
)
_BOUND = re.compile(r"(?<![-<>=@|!&~])(<=|>=|<>|<|>)(?![-<>=@|])")
_OTHER_BOUND = {"<=": "<", "<": "<=", ">=": ">", ">": ">=", "<>": "="}
_ONE = re.compile(r"(?<=[\w)\]}] )([+-]) 1\b")
_LIMIT = re.compile(r"\bLIMIT (\d+)\b")
_ORDER = re.compile(r"\bORDER BY ((?:\w+\.)?\w+)(?=\s*[,)\n\"]|\s+(?:FOR|LIMIT)\b)")
_CONDITION = re.compile(r"\b(WHERE|AND)\s+")


def changes_of_sql(text: str) -> Iterator[_Part]:
    """Give the changes of a text that holds SQL.

    >>> text = "SELECT a FROM t WHERE a <= 1 AND b = ANY (c) ORDER BY a FOR UPDATE"
    >>> for one in changes_of_sql(text):
    ...     print(text[: one.begin] + one.after + text[one.end :])
    SELECT a FROM t WHERE a <= 1 OR b = ANY (c) ORDER BY a FOR UPDATE
    SELECT a FROM t WHERE a <= 1 AND b <> ALL (c) ORDER BY a FOR UPDATE
    SELECT a FROM t WHERE a <= 1 AND b = ANY (c) ORDER BY a
    SELECT a FROM t WHERE a < 1 AND b = ANY (c) ORDER BY a FOR UPDATE
    SELECT a FROM t WHERE a <= 1 AND b = ANY (c) ORDER BY a DESC FOR UPDATE
    SELECT a FROM t WHERE b = ANY (c) ORDER BY a FOR UPDATE
    SELECT a FROM t WHERE a <= 1 ORDER BY a FOR UPDATE
    """
    for found in _WORDS.finditer(text):
        word, begin, end = found.group(), found.start(), found.end()
        if word == "AND" and _is_between(text, begin):
            continue
        if word in SWAPPED:
            yield _Part(begin=begin, end=end, after=SWAPPED[word], kind=f"{word} is other")
        else:
            of = re.compile(r" OF \w+").match(text, end)
            last = of.end() if of and word.startswith("FOR") else end
            begin -= text[begin - 1 : begin] in (" ", "\n")
            yield _Part(begin=begin, end=last, after="", kind=f"without {word}")
    for found in _BOUND.finditer(text):
        after = _OTHER_BOUND[found.group()]
        kind = f"{found.group()} is {after}"
        yield _Part(begin=found.start(), end=found.end(), after=after, kind=kind)
    for found in _ONE.finditer(text):
        yield _Part(begin=found.start(), end=found.end(), after=f"{found.group(1)} 0", kind="0")
    for found in _LIMIT.finditer(text):
        after = str(int(found.group(1)) + 1)
        yield _Part(begin=found.start(1), end=found.end(1), after=after, kind="one more")
    for found in _ORDER.finditer(text):
        after = f"{found.group(1)} DESC"
        yield _Part(begin=found.start(1), end=found.end(1), after=after, kind="the other order")
    yield from _without_conditions(text)


def _without_conditions(text: str) -> Iterator[_Part]:
    for found in _CONDITION.finditer(text):
        if found.group(1) == "AND" and _is_between(text, found.start()):
            continue
        end = _condition_end(text, found.end())
        if end is None:
            continue
        if found.group(1) == "AND":
            begin = len(text[: found.start()].rstrip())
            yield _Part(begin=begin, end=end, after="", kind="without a condition")
        elif following := re.compile(r"\s*AND\s+").match(text, end):
            begin, last = found.end(), following.end()
            yield _Part(begin=begin, end=last, after="", kind="without a condition")


def _condition_end(text: str, begin: int) -> int | None:
    """Where a condition ends that begins there: at the next word of its level."""
    depth, at, between = 0, begin, False
    while found := re.compile(r"[(){};]|\b[A-Z]+(?: BY)?\b|$(?![\s\S])|\"\"\"").search(text, at):
        word = found.group()
        if word in ("(", "{"):
            depth += 1
        elif word in (")", "}") and depth:
            depth -= 1
        elif not depth:
            if word == "BETWEEN":
                between = True
            elif word == "AND" and between:
                between = False
            elif word in ENDS:
                end = len(text[: found.start()].rstrip())
                return end if end > begin else None
        if not word:
            break
        at = found.end()
    return None


ENDS = frozenset(
    (
        *("AND", "OR", "ORDER BY", "GROUP BY", "RETURNING", "LIMIT", "FOR", "UNION", "THEN"),
        *("ELSE", "END", "WHEN", "HAVING", "WINDOW", "ON", ")", "}", ";", '"""', ""),
    )
)


def _is_between(text: str, at: int) -> bool:
    """Whether an AND there is that of a BETWEEN."""
    before = text[:at].rpartition("BETWEEN")
    return bool(before[1]) and not re.search(r"\b(AND|OR|WHERE)\b", before[2])
