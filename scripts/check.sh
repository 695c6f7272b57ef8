#!/usr/bin/env bash
# The checks, one function each:  scripts/check.sh {fast|py|full|zoo|layouts|plans|bench|cpp|standin|docs|lint|format|package|image|oldest|build_sanitized|sanitize|all} [pytest arguments]
# `make check`, `make test`, `make lint` and .ci/run call it; it expects scripts/setup.sh to have run.
set -uo pipefail
cd "$(dirname "$0")/.."
# Tests start hundreds of processes. Without files of bytecode each of them compiles all of gemini/, for two seconds.
unset PYTHONDONTWRITEBYTECODE

ROOT=$PWD
BIN=$ROOT/.venv/bin
JOBS=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
MAX_LINES=900
FAST_SECONDS=100  # of tests in `make check`
MAX_WORKERS=4  # each takes up to 1 GiB, and so does what it starts

say() { printf '[check] %s\n' "$*" >&2; }

# Runs one named check and remembers whether any failed.
failed=()
check() {
  local name=$1
  shift
  if "$@"; then say "$name: ok"; else say "$name: FAILED"; failed+=("$name"); fi
}

sources() { find csrc tests/cpp -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.inc' | LC_ALL=C sort; }

# Every text file of the project, whether git knows it yet or not.
text_files() {
  find . \( -name .git -o -name .venv -o -name build -o -name demo-output -o -name '.*_cache' -o -name .hypothesis \
    -o -name __pycache__ -o -name '*.egg-info' -o -name dist -o -name results \) -prune -o -type f \
    \( -name '*.py' -o -name '*.pyi' -o -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.inc' -o -name '*.cmake' \
    -o -name '*.sh' -o -name '*.md' -o -name '*.toml' -o -name '*.txt' -o -name Makefile \) -print | LC_ALL=C sort
}

# ------------------------------------------------------------------------------------------------- lint
# All text but the pages in Chinese.
is_ascii() {
  local hits
  hits=$(text_files | grep -v '^\./docs/zh/[^/]*\.md$' | LC_ALL=C xargs grep -nP '[^\x00-\x7F]')
  [ -z "$hits" ] || { printf '%s\n' "not ASCII:" "$hits" >&2; return 1; }
}

is_short() {
  local long
  long=$(text_files | grep -E '\.(py|pyi|cpp|h|cu|inc|sh)$' | xargs wc -l | awk -v max=$MAX_LINES '$2 != "total" && $1 > max')
  [ -z "$long" ] || { printf '%s\n' "longer than $MAX_LINES lines:" "$long" >&2; return 1; }
}

# mypy cannot see that parallel/ is gemini.parallel, so it gets the folders laid out as they are installed.
lay_out() {
  rm -rf "$1" && mkdir -p "$1/gemini"
  ln -s "$ROOT"/gemini/* "$1/gemini/"
  ln -s "$ROOT/parallel" "$1/gemini/parallel"
  ln -s "$ROOT/benchmarks/gemini_bench" "$1/gemini_bench"
}

# The pages but those in Chinese: scripts/prose.py says which words they may not have.
is_plain() {
  find README.md CHANGELOG.md CONTRIBUTING.md docs -name '*.md' -not -path 'docs/zh/*' -print0 | LC_ALL=C sort -z \
    | xargs -0 "$BIN/python" scripts/prose.py >&2
}

check_types() {
  local view=build/typing
  lay_out "$view"
  (cd "$view" && "$BIN/mypy" --config-file "$ROOT/pyproject.toml" --cache-dir "$ROOT/.mypy_cache" -p gemini -p gemini_bench)
}

# clang's own warnings, of mutexes that are not held among them (csrc/common/mutex.h), and clang-tidy's.
tidy() {
  local dir
  dir=$(extension_dir)
  build_tests "$dir" "" "$(python_for_cmake)" "$(pybind11_for_cmake)" && "$BIN/python" scripts/tidy.py "$dir" "$JOBS"
}

# What the last run of all tests said of its own cost.
have_reasons() { [ ! -e "$CPU_TIMES" ] || "$BIN/python" tests/cpu_times.py "$CPU_TIMES"; }

lint() {
  check "ruff check" "$BIN/ruff" check -q .
  check "ruff format" "$BIN/ruff" format -q --check .
  check "clang-format" eval 'sources | xargs "$BIN/clang-format" --dry-run --Werror'
  if [ "${1:-}" != untidied ] && has_gtest; then check "clang-tidy" tidy; fi
  check "mypy" check_types
  check "dear cases give a reason" have_reasons
  check "prose" is_plain
  check "ASCII" is_ascii
  check "file length" is_short
}

format() {
  "$BIN/ruff" check -q --fix .
  "$BIN/ruff" format -q .
  sources | xargs "$BIN/clang-format" -i
}

# -------------------------------------------------------------------------------------------------- docs
build_site() {
  lay_out build/typing
  NO_MKDOCS_2_WARNING=1 "$BIN/mkdocs" build --strict -q
}

docs() {
  check "site of the documentation" build_site
  check "links of the site" "$BIN/python" scripts/site_links.py build/site
  if "$BIN/python" scripts/site_browser.py --which > /dev/null 2>&1; then
    check "every page and the search in a browser" "$BIN/python" scripts/site_browser.py build/site
    return
  fi
  say "pages in a browser left out: no Chromium; add with: apt-get install chromium-headless-shell"
  if command -v node > /dev/null; then
    check "search of the site from files" node scripts/site_search.js build/site "out of memory" fit.html
  else
    say "search of the site left out: needs node"
  fi
}

# ------------------------------------------------------------------------------------------------- tests
# One worker more than there are processors: cases wait for disks and for each other. Cases of a group share a worker,
# which imports and starts what they need once.
readonly SPREAD=(-n "$((JOBS + 1))" --maxprocesses "$MAX_WORKERS" --dist loadscope --no-loadscope-reorder)
readonly CPU_TIMES=build/cpu-times.json

spread() { env OMP_NUM_THREADS=1 "$BIN/python" -m pytest "${SPREAD[@]}" "$@"; }

# Whether a commit of the last three days changed what intercepts, stores or casts. On each of these days another third
# of the models is run.
changed_how_models_run() {
  local base
  base=$(git rev-list -1 --before="$(($(git log -1 --format=%ct) - 3 * 86400))" HEAD 2> /dev/null)
  [ -z "$base" ] || ! git diff --quiet "$base" -- gemini/runtime gemini/model gemini/chunk
}

# All tests are spread over processes; those that arguments choose run in one, where -s and --pdb work and times compare.
py() {
  if [ $# -gt 0 ]; then
    check "pytest" "$BIN/python" -m pytest "$@"
  else
    local models=()
    if changed_how_models_run; then models=("--models-of-day=$(($(git log -1 --format=%ct) / 86400))"); fi
    check "pytest" spread "--cpu-times=$CPU_TIMES" "${models[@]}"
  fi
}

# Every test with the whole products of its parameters, and every model: before a release.
full() { check "pytest, all of it" spread --full; }

# All models of tests/zoo, and docs/zoo.md with what is found out about each.
zoo() { check "zoo" spread tests/zoo --full --write-zoo; }

# Random layouts of 1 to 4 ranks, each compared with one process of plain torch; arguments are those of the program.
layouts() { check "random layouts" campaign campaign.py "$@"; }

# Plans for random models, ranks and budgets: each is run, and compared with what was planned.
plans() { check "random plans" campaign plan_campaign.py "$@"; }

campaign() {
  local program=$1 tests=$ROOT/tests
  shift
  env OMP_NUM_THREADS=1 PYTHONPATH="$tests:$tests/parallel:$tests/planner:$tests/layouts" \
    HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$BIN/python" "tests/layouts/$program" "$@"
}

# All cases of the drivers of benchmarks.
bench() { check "drivers of benchmarks" spread --full tests/unit/test_bench*.py; }

# The loop of every day: the laws and what a change reaches, nearest first, for as long as one waits for it.
fast() {
  local base=HEAD tests
  if git rev-parse --verify -q '@{upstream}' > /dev/null; then base='@{upstream}'; fi
  # clang-tidy takes minutes, and what it looks at is mostly what it was.
  if git diff --quiet "$base" -- csrc tests/cpp 2> /dev/null; then lint untidied; else lint; fi
  mapfile -t tests < <("$BIN/python" scripts/affected.py)
  check "pytest, what changed and the laws" spread --hypothesis-profile dev \
    "--stop-after=$FAST_SECONDS" "${tests[@]}"
}

# Where setup.py builds the extension, so that its core is compiled once, and what it tells cmake.
extension_dir() { "$BIN/python" -c 'import sysconfig; print("build/cmake-" + sysconfig.get_config_var("SOABI"))'; }
python_for_cmake() { echo "-DPython_EXECUTABLE=$BIN/python"; }
pybind11_for_cmake() { echo "-Dpybind11_DIR=$("$BIN/python" -m pybind11 --cmakedir)"; }

# build_tests FOLDER TARGETS [cmake options]: configure and build C++ tests; the target cpp_tests is all of them, and
# without targets nothing is built.
build_tests() {
  local dir=$1 targets=$2
  shift 2
  local configure=("$BIN/cmake" -S . -B "$dir" -G Ninja "-DCMAKE_MAKE_PROGRAM=$BIN/ninja")
  grep -qsF "CMAKE_HOME_DIRECTORY:INTERNAL=$ROOT" "$dir/CMakeCache.txt" || configure+=(--fresh)
  local log
  log=$(mktemp)
  # shellcheck disable=SC2086
  if "${configure[@]}" -DGEMINI_TESTS=ON "-DGEMINI_WERROR=${GEMINI_WERROR:-ON}" "$@" > "$log" 2>&1 \
    && { [ -z "$targets" ] || "$BIN/cmake" --build "$dir" -j "$JOBS" --target $targets >> "$log" 2>&1; }; then
    rm -f "$log"
    return 0
  fi
  cat "$log" >&2
  rm -f "$log"
  return 1
}

run_tests() { "$BIN/ctest" --test-dir "$1" -j "$JOBS" --output-on-failure --no-tests=error "${@:2}"; }

has_gtest() {
  printf '#include <gtest/gtest.h>\n' | c++ -x c++ -std=c++20 -E - > /dev/null 2>&1 && return 0
  say "C++ tests left out: GoogleTest is missing; add with: apt-get install libgtest-dev"
  return 1
}

cpp() {
  has_gtest || return 0
  local dir
  dir=$(extension_dir)
  check "build C++ tests" build_tests "$dir" cpp_tests "$(python_for_cmake)" "$(pybind11_for_cmake)"
  check "C++ tests" run_tests "$dir"
}

# All tests that need a GPU, on the stand-in for one. Its kernel of Adam, which test_gpu_adam.py looks at, takes nvcc.
standin() {
  has_gtest || return 0
  "$BIN/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' \
    || { say "tests on the stand-in for CUDA left out: this torch has CUDA itself"; return 0; }
  local dir
  dir=$(extension_dir)
  check "build the stand-in for CUDA" build_tests "$dir" torch_cuda_standin "$(python_for_cmake)" "$(pybind11_for_cmake)" \
    "-DGEMINI_TORCH_DIR=$("$BIN/python" -c 'import torch; print(torch.__path__[0])')"
  local tests=(env OMP_NUM_THREADS=1 PYTHONPATH=tests/standin "GEMINI_STANDIN_DIR=$dir/standin" "$BIN/python" -m pytest -m cuda)
  local kernel=tests/unit/test_gpu_adam.py without='' files
  if "$BIN/python" -c 'import sys; from gemini import _C; sys.exit(_C.build_info()["cuda"] is None)'; then
    check "tests of Adam's kernel for GPUs before 8.0" env GEMINI_STANDIN_OLD_GPU=1 "${tests[@]}" "$kernel"
  else
    say "tests of Adam's kernel on a GPU left out: nvcc is missing"
    without=$kernel
  fi
  # Named one by one: collecting all tests takes each worker half a minute.
  mapfile -t files < <(grep -rlE 'mark\.cuda|gpu_harness' tests --include='test_*.py' | grep -vxF "$without")
  check "tests of a GPU on the stand-in" "${tests[@]}" "${SPREAD[@]}" "${files[@]}"
}

# The thread sanitizer looks at the parts that own threads.
readonly THREADED=(arena_test engine_test async_file_test async_file_extents_test async_file_faults_test gpu_engine_test \
  gpu_blocks_test cuda_driver_test parallel_test fault_guard_test pulse_test)

build_sanitized() {
  local core_only=(-DGEMINI_BINDINGS=OFF -DGEMINI_CUDA=OFF -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG=-O1)
  has_gtest || return 0
  check "build with address,undefined" build_tests build/cpp-asan cpp_tests "${core_only[@]}" \
    -DGEMINI_SANITIZE=address,undefined
  check "build with thread" build_tests build/cpp-tsan "${THREADED[*]}" "${core_only[@]}" -DGEMINI_SANITIZE=thread
}

sanitize() {
  has_gtest || return 0
  build_sanitized
  check "C++ tests with address,undefined" run_tests build/cpp-asan
  check "C++ tests with thread" run_tests build/cpp-tsan -R "^($(IFS='|'; echo "${THREADED[*]}"))$"
}

# ------------------------------------------------------------------------------------------------- package
# sdist -> wheel -> installed elsewhere: only gemini/ comes out of it, and it imports from any directory. The wheel is made
# from the unpacked sdist, but for the module: that is the one which setup.sh compiled and the tests ran with, once it is
# shown that the sdist would give the same.
package_round_trip() (
  built=$ROOT/$(extension_dir)
  work=$(realpath "$(mktemp -d)")
  trap 'rm -rf "$work"' EXIT
  "$BIN/cmake" --build "$built" --target _C > "$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
  for module in gemini/_C.*.so; do
    cmp "$module" "$built/${module##*/}" || { echo "what is built and what is installed differ: run scripts/setup.sh" >&2; exit 1; }
  done
  "$BIN/python" -c 'import setuptools.build_meta as b, sys; b.build_sdist(sys.argv[1])' "$work" > "$work/log" 2>&1 \
    && mkdir "$work/source" && tar -xzf "$work"/*.tar.gz -C "$work/source" --strip-components 1 || { cat "$work/log" >&2; exit 1; }
  options=$(sed -n 's/^\(GEMINI_[A-Z]*\|CMAKE_BUILD_TYPE\):[A-Z]*=\([A-Za-z,]\{1,\}\)$/\1=\2/p' "$built/CMakeCache.txt")
  # shellcheck disable=SC2086
  env $options GEMINI_COMPILED="$built" \
    "$BIN/python" -m pip wheel -q --no-build-isolation --no-deps -w "$work/wheel" "$work/source" || exit 1
  "$BIN/python" scripts/same_build.py "$built" "$work/source/$(extension_dir)" || exit 1
  "$BIN/python" -m pip install -q --no-deps --target "$work/site" "$work"/wheel/*.whl || exit 1
  stray=$(cd "$work/site" && find . -mindepth 1 -maxdepth 1 ! -name gemini ! -name '*.dist-info' ! -name bin)
  [ -z "$stray" ] || { echo "the wheel also installs: $stray" >&2; exit 1; }
  cd / && PYTHONPATH=$work/site "$BIN/python" -c '
import gemini, gemini._C, gemini.parallel, pathlib, sys
assert pathlib.Path(gemini._C.__file__).is_relative_to(sys.argv[1]), gemini._C.__file__
assert pathlib.Path(gemini.__file__).with_name("py.typed").exists()' "$work/site"
)

package() { check "sdist, wheel, install" package_round_trip; }

# The image of Dockerfile, where there is a Docker daemon; $TORCH_INDEX may name the index of CPU wheels.
build_image() {
  docker build -q -t gemini-runtime --build-arg "TORCH_INDEX=${TORCH_INDEX:-${PIP_EXTRA_INDEX_URL:-}}" . \
    && docker run --rm gemini-runtime check
}

image() {
  docker info > /dev/null 2>&1 || { say "image left out: needs a Docker daemon"; return 0; }
  check "image of Dockerfile" build_image
}

# A wheel of this interpreter, around the module that setup.sh compiled, with the oldest torch that pyproject.toml allows,
# where the package index has that.
oldest() {
  local torch versions python
  torch=$(sed -n 's/^dependencies = .*"torch>=\([0-9.]*\)".*/\1.0/p' pyproject.toml)
  versions=$("$BIN/pip" index versions torch 2> /dev/null) || versions=
  [[ " ${versions//[,$'\n']/ } " == *" $torch "* ]] \
    || { say "laws with torch $torch left out: the package index has none for this Python"; return 0; }
  python=$("$BIN/python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
  check "laws with torch $torch" env GEMINI_COMPILED="$ROOT/$(extension_dir)" scripts/wheels.sh laws "$python=$torch"
}

case "${1:-}" in
  py | layouts | plans) "$@" ;;
  fast | full | zoo | bench | docs | lint | format | cpp | standin | build_sanitized | sanitize | package | image | oldest) "$1" ;;
  all) lint; docs; py; cpp; standin; sanitize; package ;;
  *) sed -n '2,3p' "$0" >&2; exit 2 ;;
esac
[ ${#failed[@]} -eq 0 ] || { say "failed: ${failed[*]}"; exit 1; }
