#!/usr/bin/env bash
# Build Mesa's compiler for Apple's GPUs (AGX: M1, M2) as a command that reads SPIR-V and prints machine code.
# Needs Debian 12 and takes about two minutes on two cores. Does nothing if the command exists. Prints its file's path.
set -euo pipefail
home="${1:-${XDG_CACHE_HOME:-$HOME/.cache}/mlx-lstm/agx}"
command="$home/build/src/asahi/clc/asahi_clc"
[ -x "$command" ] && { echo "$command"; exit; }
root=; [ "$(id -u)" = 0 ] || root=sudo
mkdir -p "$home"; cd "$home"
$root apt-get update -qq
$root apt-get install -y -qq --no-install-recommends llvm-15-dev libclang-15-dev libclang-cpp15-dev libclc-15-dev \
  libclc-15 libllvmspirvlib-15-dev llvm-spirv-15 clang-15 spirv-tools libdrm-dev ninja-build flex bison pkg-config \
  libexpat1-dev zlib1g-dev libelf-dev g++ cmake libxml2-dev > apt.log
# Download the source of Mesa 25.0. It belongs to Debian 13 (trixie), so apt gets a separate list of sources here.
if [ ! -d mesa ]; then
  archive=$(grep -h -m1 '^URIs' /etc/apt/sources.list.d/debian.sources | sed 's/URIs: *//')
  mkdir -p apt/lists/partial apt/cache/archives/partial
  echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive trixie main" > apt/sources.list
  options=(-o Dir::Etc::sourcelist="$home/apt/sources.list" -o Dir::Etc::sourceparts=/nonexistent
    -o Dir::State::lists="$home/apt/lists" -o Dir::Cache="$home/apt/cache")
  apt-get "${options[@]}" update -qq
  apt-get "${options[@]}" source --download-only -qq mesa
  mkdir mesa.part && tar xf mesa_*.orig.tar.xz -C mesa.part --strip-components=1 && mv mesa.part mesa
fi
# Change Mesa's compiler in three ways. It gives a name to functions and parameters that have none. It exits after
# printing the machine code; it writes no file and does not reject kernels that spill registers. And a shuffle becomes
# one instruction, which the hardware needs for a fixed distance or within a quad of lanes; unchanged Mesa makes four
# instructions of any shuffle.
python3 - <<'PYTHON'
from pathlib import Path

def change(file, *pairs):
    path = Path("mesa/src") / file
    text = path.read_text()
    for old, new in pairs:
        if new not in text:
            assert old in text, (file, old)
            text = text.replace(old, new, 1)
    path.write_text(text)

name = 'if (!func->name) func->name = func->is_entrypoint ? "kernel_entry" : "anonymous";'
loop = "   nir_foreach_function(func, nir) {\n"
change("compiler/nir/nir_fixup_is_exported.c", (loop, f"{loop}      {name}\n"))
four = "for (unsigned i = 0; i < 4; ++i) {"
change("asahi/compiler/agx_nir_lower_subgroups.c", (four, four.replace("4", "1")))
named = 'if (!libfunc->params[i].name) libfunc->params[i].name = ralloc_asprintf(nir, "p%u", i);'
flags = "      libfunc->pass_flags = 0;\n"
change(
    "asahi/clc/asahi_clc.c",
    ("            print_shader(fp_c, libfunc->name, *target, v, &compiled);\n", "            fflush(stdout); _exit(0);\n"),
    (flags, f"      for (unsigned i = 0; i < libfunc->num_params; ++i) {named}\n\n{flags}"),
    ("      nir_precomp_print_layout_struct(fp_h, &opt, libfunc);\n", "      ;\n"),
)
PYTHON
python3 -m venv venv && venv/bin/pip install -q meson mako pyyaml packaging setuptools
export PATH="$home/venv/bin:/usr/lib/llvm-15/bin:$PATH"
[ -d build ] || meson setup build mesa -Dbuildtype=release -Dplatforms= -Dgallium-drivers= -Dvulkan-drivers=asahi \
  -Dtools=asahi -Dglx=disabled -Degl=disabled -Dgbm=disabled -Dopengl=false -Dgles1=disabled -Dgles2=disabled \
  -Dllvm=enabled -Dshared-llvm=enabled -Dmesa-clc=enabled -Dprecomp-compiler=enabled -Dvideo-codecs= \
  -Dbuild-tests=false -Dvalgrind=disabled -Dlibunwind=disabled -Dlmsensors=disabled -Dxmlconfig=disabled \
  -Dzstd=disabled -Dshader-cache=disabled > meson.log
ninja -C build src/asahi/clc/asahi_clc > ninja.log
echo "$command"
