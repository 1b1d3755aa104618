"""Make small changes that damage a kernel: to its barriers, conditions and indices. Good tests fail for each damaged
kernel."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from . import runtime
from .lowering import blank_comments, line_of, matching

_BARRIER = re.compile(r"\b(threadgroup_barrier|simdgroup_barrier)\s*\(([^;]*)\)\s*;")
_CONDITION = re.compile(r"\b(?:for|while|if)\s*(?:constexpr\s*)?\(")
_COMPARISON = re.compile(r"(?<=\s)(<=|>=|<|>)(?=\s)")
_OFFSET = re.compile(r"\s[+-]\s1u?\b(?!\s*[*/.])")
_DECLARED = re.compile(
    r"(?:^|[;{}])\s*(?:const\s+|threadgroup\s+|thread\s+|constant\s+|constexpr\s+)*"
    r"(?!return\b)[A-Za-z_][\w:]*(?:<[^;]*>)?\s+[^;=]*$"
)
_SWAPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}


@dataclass(frozen=True)
class Mutation:
    """A damaged kernel. description: what was changed, and in which line. text: the whole damaged source."""

    description: str
    line: int
    text: str


def mutations(text: str) -> Iterator[Mutation]:
    """Yield every mutation (damaged version) of a kernel's header or body. Lines are counted from the start of
    `text`."""
    code = blank_comments(text)
    for edits in (_barriers(code), _comparisons(code), _subscripts(code)):
        for start, end, new, what in edits:
            line = line_of(code, start)
            yield Mutation(f"line {line}: {what}", line, text[:start] + new + text[end:])


@contextmanager
def chosen(number: int) -> Iterator[None]:
    """Make kernels whose text comes from `with_choice` run with the damage of this number inside the context; 0 means
    without damage."""
    runtime.library().chosen_damage(number)
    try:
        yield
    finally:
        runtime.library().chosen_damage(0)


def with_choice(text: str, lines: Collection[int]) -> tuple[str, dict[int, str]]:
    """Return one text that contains all damages of barriers and comparisons in these lines of a source, and {number:
    description} of the damages. `chosen` selects the number of a damage when the kernel runs. So one compiled kernel
    serves for all damages, because compiling a kernel takes far longer than running it.

    If a constant of the kernel depends on a changed comparison, the text does not compile, because the constant would
    depend on the selected number. The text begins with additional definitions, so the lines of the source get larger
    numbers.
    """
    code, numbers, edits = blank_comments(text), dict[int, str](), list[tuple[int, int, str]]()
    for start, end, new, what in (*_barriers(code), *_comparisons(code)):
        line = line_of(code, start)
        if line not in lines:
            continue
        numbers[len(numbers) + 1] = f"line {line}: {what}"
        edits.append((start, end, new))
    places = sorted({(start, end) for start, end, _ in edits}, reverse=True)
    for start, end in places:
        old, changes = text[start:end], [n + 1 for n, edit in enumerate(edits) if edit[:2] == (start, end)]
        if old in _SWAPPED:
            # Write the comparison as two operators with an object between them: `a < Comparison<...>() > b` (see
            # _COMPARISON_CLASS). It has the same precedence as the single operator.
            new = f"< Comparison<{list(_SWAPPED).index(old)}, {changes[0]}>() >"
        elif old.startswith("mem_flags"):
            new = "".join(f"chosen_damage(-1) == {n} ? {edits[n - 1][2]} : " for n in changes) + old
        else:  # a barrier: insert the choice before it. Its flags may be replaced already, so `end` is not its end.
            new, end = f"chosen_damage(-1) == {changes[0]} ? void() : ", start
        text = text[:start] + new + text[end:]
    return _COMPARISON_CLASS + text, numbers


# A comparison whose damage is selected at run time. `a < Comparison<0, 5>() > b` is `a < b`; with damage 5 it is `a <=
# b`, and with damage 6 it is `a < -1 + b`. OPERATOR is the index of the operator in _SWAPPED. There is no blank line
# inside, so that a kernel's header contains either all of these definitions or none.
_COMPARISON_CLASS = """\
extern "C" int chosen_damage(int);
template <int OPERATOR, int DAMAGE> struct Comparison {};
template <int OPERATOR, int DAMAGE, typename A> struct LeftOfComparison { A a; };
template <int OPERATOR, int DAMAGE, typename A>
inline LeftOfComparison<OPERATOR, DAMAGE, A> operator<(A a, Comparison<OPERATOR, DAMAGE>) { return {a}; }
template <int OPERATOR, int DAMAGE, typename A, typename B>
inline bool operator>(LeftOfComparison<OPERATOR, DAMAGE, A> left, B b) {
  const int damage = chosen_damage(-1) - DAMAGE;
  const A a = left.a;
  if (OPERATOR == 0) return damage == 0 ? a <= b : damage == 1 ? a < -1 + b : a < b;
  if (OPERATOR == 1) return damage == 0 ? a < b : a <= b;
  if (OPERATOR == 2) return damage == 0 ? a >= b : a > b;
  return damage == 0 ? a > b : damage == 1 ? a >= 1 + b : a >= b;
}

"""


Edit = tuple[int, int, str, str]


def _barriers(code: str) -> Iterator[Edit]:
    for m in _BARRIER.finditer(code):
        name, flags = m.group(1), [f.strip() for f in m.group(2).split("|")]
        yield m.start(), m.end(), ";", f"{name} removed"
        if flags == ["mem_flags::mem_none"]:
            continue
        if len(flags) == 1:
            weaker = {"mem_none": "mem_flags::mem_none"}
        else:
            weaker = {
                " | ".join(flags[:i] + flags[i + 1 :]): " | ".join(flags[:i] + flags[i + 1 :])
                for i in range(len(flags))
            }
        for label, new in weaker.items():
            yield m.start(2), m.end(2), new, f"{name} weakened to {label}"


def _conditions(code: str) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each condition in the code: of `if` and `while`, of `a ? b : c`, and of `for`
    loops."""
    for m in _CONDITION.finditer(code):
        end = matching(code, m.end(), "(", ")") - 1
        if m.group().startswith("for"):
            parts = [i for i in range(m.end(), end) if code[i] == ";"]
            if len(parts) == 2:
                yield parts[0], parts[1]
        else:
            yield m.end(), end
    for m in re.finditer(r"\s\?\s", code):  # the condition of `a ? b : c` ends here
        start = max(code.rfind(c, 0, m.start()) for c in ";{}=,(")
        yield start + 1, m.start()


def _comparisons(code: str) -> Iterator[Edit]:
    seen: set[int] = set()
    for start, end in _conditions(code):
        for m in _COMPARISON.finditer(code, start, end):
            if m.start() in seen:
                continue
            seen.add(m.start())
            old = m.group()
            yield m.start(), m.end(), _SWAPPED[old], f"{old} becomes {_SWAPPED[old]}"
            if old == "<":
                yield m.start(), m.end(), "< -1 +", "the bound of < is one less"
            if old == ">=":
                yield m.start(), m.end(), ">= 1 +", "the bound of >= is one more"


def _subscripts(code: str) -> Iterator[Edit]:
    """Yield changes of array indices. An existing +1 or -1 is removed. Each index outside a declaration becomes one
    larger, and one smaller."""
    for m in re.finditer(r"(?<=[\w\])])\[(?!\[)", code):
        end = matching(code, m.end(), "[", "]") - 1
        inside = code[m.end() : end]
        statement = max(code.rfind(c, 0, m.start()) for c in ";{}")
        if not inside.strip() or _DECLARED.match(code[max(statement, 0) : m.start()]):
            continue
        for offset in _OFFSET.finditer(code, m.end(), end):
            yield offset.start(), offset.end(), "", f"{offset.group().strip()} dropped from an index"
        yield end, end, " + 1", f"index [{' '.join(inside.split())}] is one more"
        if not inside.strip().isdigit():
            yield end, end, " - 1", f"index [{' '.join(inside.split())}] is one less"
