"""Planted bugs that are not valid MSL. clang, or a rule of msl_rules.py, must reject their source."""

import mlx.core as mx

from .bug_table import X, written

READ = "inline float f(const device float* p) { return p[0]; }\n"
COPY = "inline void put(threadgroup float* d, const device float* s) { d[0] = s[0]; }\n"


def _address_spaces() -> None:
    kind = "address spaces"
    tile = "threadgroup float tile[4];\n"
    written(
        "threadgroup pointer for a device one",
        kind,
        "compile",
        tile + "put(tile, tile);\no0[i] = tile[0];",
        header=COPY,
    )
    written("device pointer for a threadgroup one", kind, "compile", "put(o0, a0);", header=COPY)
    written("constant pointer for a device one", kind, "compile", "o0[i] = f(a0);", header=READ, arrays=(X[:4],))
    written("thread pointer for a device one", kind, "compile", "float v = a0[i];\no0[i] = f(&v);", header=READ)
    written("threadgroup pointer to device memory", kind, "compile", "threadgroup float* p = o0;\np[i] = 1;")
    written(
        "parameter without an address space",
        kind,
        "compile",
        "o0[i] = f(a0);",
        header="inline float f(const float* p) { return p[0]; }\n",
    )
    written("local pointer without an address space", kind, "compile", "const float* p = a0;\no0[i] = p[i];")
    written(
        "reference without an address space",
        kind,
        "compile",
        "float v = a0[i];\nadd(v);\no0[i] = v;",
        header="inline void add(float& v) { v += 1.0f; }\n",
    )
    written(
        "threadgroup variable in a function",
        kind,
        "compile",
        "o0[i] = f(a0[i]);",
        header="inline float f(float v) { threadgroup float t[4]; t[0] = v; return t[0]; }\n",
    )
    written("threadgroup variable with a value", kind, "compile", "threadgroup float t = 0;\no0[i] = t;")


def _language() -> None:
    kind, one = "language", {"threads": 1, "group": 1, "shapes": ((1,),)}
    written("32 buffers", kind, "compile", "o0[i] = a30[i];", arrays=(X,) * 31)
    later = "template <class A> float twice(A a) { return doubled<2>(a); }\n"
    later += "template <int N> float doubled(float a) { return N * a; }\n"
    written("template called before it is declared", kind, "compile", "o0[i] = twice(a0[i]);", header=later)
    pair = "struct Pair { float a, b; };\n"
    written("structured binding", kind, "compile", "auto [a, b] = Pair{1, 2};\no0[i] = a + b;", header=pair)
    fold = "template <class... A> float sum(A... a) { return (a + ...); }\n"
    written("fold expression", kind, "compile", "o0[i] = sum(a0[i], 1.0f);", header=fold)
    half = {"arrays": (X,), "dtype": mx.float16}
    written(
        "float matrix from half memory",
        kind,
        "compile",
        "simdgroup_float8x8 m;\nsimdgroup_load(m, a0, 8);\nsimdgroup_store(m, o0, 8);",
        threads=32,
        **half,
    )
    written("float assigned to bfloat", kind, "compile", "o0[i] = float(a0[i]) * 2.0f;", dtype=mx.bfloat16)
    written("16x16 matrix", kind, "compile", "simdgroup_matrix<float, 16, 16> m;\no0[i] = 0;")
    for name, expression in {
        "std::exp": "std::exp(a0[i])",
        "expf": "expf(a0[i])",
        "erf": "erf(a0[i])",
        "exp of an int": "metal::exp(3)",
        "double": "float(double(a0[i]) * 2.0)",
        "bfloat exp without MLX's overload": "float(metal::erfc(bfloat16_t(1.0f)))",
    }.items():
        written(name, kind, "compile", f"o0[i] = {expression};", **one)


def _missing_features() -> None:
    kind, one = "language", {"threads": 1, "group": 1, "shapes": ((1,),)}
    written("printf", kind, "compile", 'printf("x");\no0[i] = 1;', **one)
    written("#include <cmath>", kind, "compile", "o0[i] = 1;", header="#include <cmath>\n", **one)
    recursive = "inline int f(int n) { return n < 2 ? 1 : n * f(n - 1); }\n"
    written("recursion", kind, "compile", "o0[i] = float(f(5));", header=recursive, **one)
    mutual = "inline int g(int n);\ninline int f(int n) { return n < 2 ? 1 : g(n - 1); }\n"
    mutual += "inline int g(int n) { return f(n - 1); }\n"
    written("mutual recursion", kind, "compile", "o0[i] = float(f(5));", header=mutual, **one)
    template = "template <typename U> inline U f(U n) { return n < U(2) ? U(1) : n * f<U>(n - U(1)); }\n"
    written("recursion of a template", kind, "compile", "o0[i] = f<float>(5.0f);", header=template, **one)
    virtual = "struct V { virtual float f() { return 1; } };\n"
    written("virtual function", kind, "compile", "V v;\no0[i] = v.f();", header=virtual, **one)
    written("new", kind, "compile", "thread int* p = new int[3];\no0[i] = p[0];", **one)
    (written("field with its type's name", kind, "compile", "struct A { decltype(+i) i; };\no0[i] = 3;", **one),)
    written("goto", kind, "compile", "goto end;\nend: o0[i] = 3;", **one)
    written("throw", kind, "compile", "if (a0[0] > 5) throw 1;\no0[i] = 1;", **one)
    written(
        "function pointer",
        kind,
        "compile",
        "float (*p)(float) = f;\no0[i] = p(a0[0]);",
        header="inline float f(float v) { return v; }\n",
        **one,
    )
    written("static variable", kind, "compile", "static int n = 0;\nn++;\no0[i] = n;", **one)
    written("global variable", kind, "compile", "n++;\no0[i] = n;", header="int n = 0;\n", **one)
    written(
        "global constexpr without constant",
        kind,
        "compile",
        "o0[i] = LIMIT;",
        header="constexpr int LIMIT = 4;\n",
        **one,
    )
    written(
        "array of variable length",
        kind,
        "compile",
        "int n = int(a0[1]) + 2;\nfloat v[n];\nv[0] = 1;\no0[i] = v[0];",
        **one,
    )
    atomic = {"atomic_outputs": True, "init_value": 0.0, **one}
    add = "atomic_fetch_add_explicit(&o0[0], a0[0], memory_order_{0});"
    written("atomic half", kind, "compile", add.format("relaxed"), dtype=mx.float16, **atomic)
    written("sequentially consistent atomic", kind, "compile", add.format("seq_cst"), **atomic)
    written("misspelt template parameter", kind, "compile", "o0[i] = static_cast<TT>(1);", **one)
    written("half4 from two half", kind, "compile", "half4 v = half4(half(1), half(2));\no0[i] = v.x;", **one)


def add_bugs() -> None:
    """Add kernels with bugs that break a rule of Metal's language (e.g. on address spaces) to the table of planted
    bugs."""
    for add in (_address_spaces, _language, _missing_features):
        add()
