"""The text of the shaders made short, as MLX builds and hashes it again for every launch: a third of what is in metal/.

Comments, indentation and needless blanks go, names of our own become two characters, and frequent words of the language
macros; 0.0f is 0.f. Every line stays a line, and every name has one short form everywhere, so that a line of a kernel
can be traced back to its file.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from string import ascii_letters, digits

WORDS_OF_METAL = """
abs as_type bool break case char clamp clang class const constant constexpr continue default device do dot else enum
exp false fast float float2 float3 float4 fma for full half half2 half4 if inline int int2 int3 int4 int64_t
isfinite long loop make_filled_simdgroup_matrix max mem_device mem_flags mem_none mem_threadgroup metal min or
pragma precise quad_sum return select short simd_max simd_min simd_shuffle simd_shuffle_down simd_shuffle_up
simd_shuffle_xor simd_sum simdgroup_barrier simdgroup_float8x8 simdgroup_half8x8 simdgroup_load simdgroup_matrix
simdgroup_multiply simdgroup_multiply_accumulate simdgroup_store sizeof sqrt static_assert struct switch tanh
template thread thread_elements threadgroup threadgroup_barrier true typename uchar uint uint2 uint3 ulong2 unroll
unsigned ushort ushort2 using vec void while
"""
LANGUAGE = frozenset(WORDS_OF_METAL.split())
"""Words of Metal in the shaders; a word that is missing here makes a kernel that does not compile."""

FROM_OUTSIDE = re.compile(r"absent|Pieces|Rows|recurrent_input|(stepwise|fused)_\w+")
"""Names of ours that a launch's body has."""

MACROS = ("const", "float", "return", "template", "class", "device", "thread", "int", "long", "threadgroup")
MACROS += ("constant", "constexpr")

PHRASES = {
    "#pragma clang loop unroll(full)": '_Pragma("clang loop unroll(full)")',
    "threadgroup_barrier(mem_flags::mem_threadgroup)": "threadgroup_barrier(mem_flags::mem_threadgroup)",
}
"""What becomes a macro too, and what that stands for."""

WORD = re.compile(r"\b[A-Za-z_]\w*")

BLANKS = re.compile(r"(?<=[^\w\s>])\s+(?=[\w;,(){}[\]])|(?<=[\w;,(){}[\]])\s+(?=[^\w\s])")
"""Blanks that separate no two words and no two operators."""


def shader_folder() -> Path:
    """metal/, which lies in the package of a wheel and beside that of a checkout."""
    packaged = files("mlx_lstm") / "metal"
    return packaged if packaged.is_dir() else Path(__file__).parents[3] / "metal"


@cache
def short_names() -> dict[str, str]:
    """The short form of every word that has one."""
    texts = {path.stem: path.read_text(encoding="ascii") for path in sorted(shader_folder().glob("*.metal"))}
    count = Counter(word for text in texts.values() for word in WORD.findall(without_comments(text)))
    used = {*count, *LANGUAGE}
    free = (a + b for a, b in product(ascii_letters, ascii_letters + digits) if a + b not in used)
    ours = sorted(word for word in {*count} - LANGUAGE if len(word) > 2 and not FROM_OUTSIDE.fullmatch(word))
    return dict(zip((*PHRASES, *MACROS, *ours), free, strict=False))


def macros() -> str:
    """The head of a kernel's text: the words that are macros in it."""
    meanings = PHRASES | {word: word for word in MACROS}
    return "".join(f"#define {short_names()[word]} {meaning}\n" for word, meaning in meanings.items())


def short_lines(text: str) -> list[str]:
    """A shader's text, line by line, made short."""
    names, lines = short_names(), []
    for line in without_comments(text).splitlines():
        line = re.sub(r"(\d\.)0f\b", r"\1f", re.sub(r"\binline\b", "", line))
        for phrase in PHRASES:
            line = line.replace(phrase, names[phrase])
        if not line.lstrip().startswith("#"):
            line = BLANKS.sub("", WORD.sub(lambda word: names.get(word.group(), word.group()), line))
        lines.append(line.strip())
    return lines


def shorten(text: str) -> str:
    """A shader's text, made short and without its empty lines."""
    return "\n".join(line for line in short_lines(text) if line) + "\n"


def without_comments(text: str) -> str:
    """The text, its comments cut off."""
    return re.sub(r"//.*", "", text)
